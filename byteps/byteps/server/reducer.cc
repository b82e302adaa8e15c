#include "byteps/server/reducer.h"

#include <cmath>
#include <cstring>

#include "byteps/base/dtype.h"

namespace byteps {
namespace core {
namespace {

// Reads an element at an unaligned address.
template <typename T>
inline T Load(const void* p, size_t i) {
  T v;
  memcpy(&v, static_cast<const char*>(p) + i * sizeof(T), sizeof(T));
  return v;
}

template <typename T>
inline void Store(void* p, size_t i, T v) {
  memcpy(static_cast<char*>(p) + i * sizeof(T), &v, sizeof(T));
}

// Formats of the element types, with the type of their accumulator.

struct Float32 {
  using Accumulator = double;
  static double Get(const void* p, size_t i) { return Load<float>(p, i); }
  static void Put(void* p, size_t i, double v) { Store<float>(p, i, static_cast<float>(v)); }
};

template <typename Format>
struct Half {
  using Accumulator = float;
  static float Get(const void* p, size_t i) { return FromHalf<Format>(Load<uint16_t>(p, i)); }
  static void Put(void* p, size_t i, float v) { Store<uint16_t>(p, i, ToHalf<Format>(v)); }
};

struct BFloat16 : Half<BFloat16>, BFloat16Words {};
struct Float16 : Half<Float16>, Float16Words {};

// Returns whether the CPU has an instruction for a fused multiply-add. Otherwise it is a function
// call.
inline bool HasFma() {
#if defined(__x86_64__) && defined(__GNUC__)
  return __builtin_cpu_supports("fma");
#else
  return true;
#endif
}

// Runs `loop` with the cheapest division by `divisor` that is exact for every normal quotient:
// none, a multiplication by the inverse (for a power of two), or a multiplication and one
// correction.
template <typename A, typename Loop>
BYTEPS_INLINE inline void WithDivision(int divisor, Loop loop) {
  const A d = static_cast<A>(divisor);
  const A inverse = 1 / d;
  if (divisor == 1) return loop([](A v) BYTEPS_INLINE { return v; });
  if ((divisor & (divisor - 1)) == 0) {
    return loop([inverse](A v) BYTEPS_INLINE { return v * inverse; });
  }
  // This holds for divisors of up to 21 bits. Their quotients are never so close to the midpoint of
  // two numbers that the error which the correction leaves could change the rounding.
  if (HasFma() && divisor < (1 << 21)) {
    return loop([d, inverse](A v) BYTEPS_INLINE {
      const A q = v * inverse;
      const A rest = std::fma(-q, d, v);
      // The quotient of an infinity has no remainder, and needs no correction.
      const A corrected = rest == rest ? std::fma(rest, inverse, q) : q;
      return std::copysign(corrected, v);  // std::copysign restores the sign of a zero
    });
  }
  loop([d](A v) BYTEPS_INLINE { return v / d; });
}

template <typename T>
BYTEPS_INLINE inline void AddLoop(void* __restrict sum, const void* __restrict in, int divisor,
                                  size_t n) {
  WithDivision<T>(divisor, [=](auto divide) BYTEPS_INLINE {
    for (size_t i = 0; i < n; ++i) Store<T>(sum, i, divide(Load<T>(sum, i) + Load<T>(in, i)));
  });
}

// The arithmetic of half types fills a core's reorder window, so loads would start late. So the
// loop prefetches, block by block.
constexpr size_t kBlock = 256;
constexpr size_t kAhead = 2 * kBlock;
constexpr size_t kLine = 64;

// Prefetches elements of `size` bytes, ahead of block `begin`, which is read next.
BYTEPS_INLINE inline void FetchAhead(const void* p, size_t begin, size_t size) {
  const char* next = static_cast<const char*>(p) + (begin + kAhead) * size;
  for (size_t i = 0; i < kBlock * size; i += kLine) __builtin_prefetch(next + i);
}

// Two elements of a half type. They are converted in place within one word, without shuffles.
template <typename E>
struct Pair {
  float low, high;
  static Pair Get(const void* p, size_t i) {
    const uint32_t u = Load<uint32_t>(p, i);
    return {E::FromWord(u << 16), E::FromWord(u & 0xffff0000)};
  }
  void Put(void* p, size_t i) const {
    Store<uint32_t>(p, i, E::ToWord(low) >> 16 | (E::ToWord(high) & 0xffff0000));
  }
};

template <typename E>
BYTEPS_INLINE inline void AddHalvesLoop(void* __restrict sum, const void* __restrict in,
                                        int divisor, size_t n) {
  WithDivision<float>(divisor, [=](auto divide) BYTEPS_INLINE {
    size_t i = 0;
    for (; i + kBlock <= n; i += kBlock) {
      FetchAhead(sum, i, sizeof(uint16_t));
      FetchAhead(in, i, sizeof(uint16_t));
      for (size_t j = i / 2; j < (i + kBlock) / 2; ++j) {
        const auto a = Pair<E>::Get(sum, j), b = Pair<E>::Get(in, j);
        Pair<E>{divide(a.low + b.low), divide(a.high + b.high)}.Put(sum, j);
      }
    }
    for (; i < n; ++i) E::Put(sum, i, divide(E::Get(sum, i) + E::Get(in, i)));
  });
}

// T is unsigned, because signed overflow is undefined. The bits are the same.
template <typename T>
BYTEPS_INLINE inline void AddIntegerLoop(void* __restrict sum, const void* __restrict in,
                                         size_t n) {
  for (size_t i = 0; i < n; ++i) {
    Store<T>(sum, i, static_cast<T>(Load<T>(sum, i) + Load<T>(in, i)));
  }
}

// Integer type that holds the sum of one T per worker.
template <typename T>
struct Wider {
  using Type = int32_t;
};
template <>
struct Wider<int32_t> {
  using Type = int64_t;
};
template <>
struct Wider<int64_t> {
  __extension__ using Type = __int128;
};
template <typename T>
using WiderOf = typename Wider<T>::Type;

// Divides, and rounds towards minus infinity.
template <typename T, typename Wide = WiderOf<T>>
inline T Quotient(Wide sum, int divisor) {
  if constexpr (sizeof(Wide) > sizeof(int64_t)) {  // 128-bit division is a function call
    const auto short_sum = static_cast<int64_t>(sum);
    if (short_sum == sum) return Quotient<T>(short_sum, divisor);
  }
  const auto quotient = sum / divisor;
  return static_cast<T>(sum < 0 && quotient * divisor != sum ? quotient - 1 : quotient);
}

template <typename T>
inline WiderOf<T> Sum(const void* a, const void* b, size_t i) {
  return WiderOf<T>{Load<T>(a, i)} + Load<T>(b, i);
}

// Calls `run` with a value of the integer type that `t` names.
template <typename Run>
void WithInteger(DType t, Run run) {
  if (t == DType::kUInt8) return run(uint8_t{});
  if (t == DType::kInt8) return run(int8_t{});
  t == DType::kInt32 ? run(int32_t{}) : run(int64_t{});
}

template <typename E>
BYTEPS_INLINE inline void BeginLoop(typename E::Accumulator* __restrict wide,
                                    const void* __restrict a, const void* __restrict b, size_t n) {
  for (size_t i = 0; i < n; ++i) wide[i] = E::Get(a, i) + E::Get(b, i);
}

template <typename E>
BYTEPS_INLINE inline void WideAddLoop(typename E::Accumulator* __restrict wide,
                                      const void* __restrict in, size_t n) {
  for (size_t i = 0; i < n; ++i) wide[i] += E::Get(in, i);
}

BYTEPS_INLINE inline void EndLoop(Float32, void* __restrict last, const double* __restrict wide,
                                  int divisor, size_t n) {
  WithDivision<double>(divisor, [=](auto divide) BYTEPS_INLINE {
    for (size_t i = 0; i < n; ++i) Float32::Put(last, i, divide(wide[i] + Float32::Get(last, i)));
  });
}

template <typename E>
BYTEPS_INLINE inline void EndLoop(E, void* __restrict last, const float* __restrict wide,
                                  int divisor, size_t n) {
  WithDivision<float>(divisor, [=](auto divide) BYTEPS_INLINE {
    size_t i = 0;
    for (; i + kBlock <= n; i += kBlock) {
      FetchAhead(last, i, sizeof(uint16_t));
      FetchAhead(wide, i, sizeof(float));
      for (size_t j = i; j < i + kBlock; ++j) E::Put(last, j, divide(wide[j] + E::Get(last, j)));
    }
    for (; i < n; ++i) E::Put(last, i, divide(wide[i] + E::Get(last, i)));
  });
}

// A is the accumulator type.
template <typename E, typename A>
BYTEPS_INLINE inline void ScaleLoop(void* values, const void* of, int times, int by, size_t n) {
  const auto multiplier = static_cast<A>(times);
  const auto divisor = static_cast<A>(by);
  for (size_t i = 0; i < n; ++i) {
    const A value = of == nullptr ? E::Get(values, i) : Load<A>(of, i);
    E::Put(values, i, value * multiplier / divisor);
  }
}

struct Float64 {
  static double Get(const void* p, size_t i) { return Load<double>(p, i); }
  static void Put(void* p, size_t i, double v) { Store<double>(p, i, v); }
};

// These functions instantiate the templates: a template cannot have clones for several CPUs.
#define BYTEPS_SCALE(Name, A)                                                           \
  BYTEPS_MULTIVERSION void Scale##Name(void* values, const void* of, int times, int by, \
                                       size_t n) {                                      \
    ScaleLoop<Name, A>(values, of, times, by, n);                                       \
  }
#define BYTEPS_ADD(Name, Loop)                                                           \
  BYTEPS_MULTIVERSION void Add##Name(void* sum, const void* in, int divisor, size_t n) { \
    Loop(sum, in, divisor, n);                                                           \
  }
#define BYTEPS_ADD_INTEGERS(Name, T)                                        \
  BYTEPS_MULTIVERSION void Add##Name(void* sum, const void* in, size_t n) { \
    AddIntegerLoop<T>(sum, in, n);                                          \
  }
#define BYTEPS_WIDE(Name)                                                                    \
  BYTEPS_MULTIVERSION void Begin##Name(void* wide, const void* a, const void* b, size_t n) { \
    BeginLoop<Name>(static_cast<Name::Accumulator*>(wide), a, b, n);                         \
  }                                                                                          \
  BYTEPS_MULTIVERSION void WideAdd##Name(void* wide, const void* in, size_t n) {             \
    WideAddLoop<Name>(static_cast<Name::Accumulator*>(wide), in, n);                         \
  }                                                                                          \
  BYTEPS_MULTIVERSION void End##Name(void* last, const void* wide, int divisor, size_t n) {  \
    EndLoop(Name{}, last, static_cast<const Name::Accumulator*>(wide), divisor, n);          \
  }

BYTEPS_ADD(Float32, AddLoop<float>)
BYTEPS_ADD(Float64, AddLoop<double>)
BYTEPS_ADD(BFloat16, AddHalvesLoop<BFloat16>)
BYTEPS_ADD(Float16, AddHalvesLoop<Float16>)
BYTEPS_ADD_INTEGERS(Int8, uint8_t)
BYTEPS_ADD_INTEGERS(Int32, uint32_t)
BYTEPS_ADD_INTEGERS(Int64, uint64_t)
BYTEPS_WIDE(Float32)
BYTEPS_WIDE(BFloat16)
BYTEPS_WIDE(Float16)
BYTEPS_SCALE(Float32, double)
BYTEPS_SCALE(Float64, double)
BYTEPS_SCALE(BFloat16, float)
BYTEPS_SCALE(Float16, float)

#undef BYTEPS_SCALE
#undef BYTEPS_ADD
#undef BYTEPS_ADD_INTEGERS
#undef BYTEPS_WIDE

}  // namespace

const char* InstructionSet() {
#ifdef BYTEPS_CHOOSES_CLONES
  // These checks are in the order in which the dispatcher of clones makes them.
  if (__builtin_cpu_supports("x86-64-v4")) return "x86-64-v4";
  if (__builtin_cpu_supports("x86-64-v3")) return "x86-64-v3";
#endif
#if defined(__x86_64__)
  return "x86-64";
#elif defined(__aarch64__)
  return "armv8-a";
#else
  return "plain";
#endif
}

size_t AccumulatorSize(DType t) {
  if (IsHalf(t)) return sizeof(float);
  if (t == DType::kFloat32) return sizeof(double);
  size_t size = 0;
  if (IsInteger(t)) WithInteger(t, [&](auto zero) { size = sizeof(WiderOf<decltype(zero)>); });
  return size;
}

void Add(DType t, void* sum, const void* in, int divisor, size_t n) {
  if (IsInteger(t) && divisor != 1) {
    return WithInteger(t, [=](auto zero) {
      using T = decltype(zero);
      for (size_t i = 0; i < n; ++i) Store<T>(sum, i, Quotient<T>(Sum<T>(sum, in, i), divisor));
    });
  }
  switch (t) {
    case DType::kFloat32:
      return AddFloat32(sum, in, divisor, n);
    case DType::kFloat64:
      return AddFloat64(sum, in, divisor, n);
    case DType::kBFloat16:
      return AddBFloat16(sum, in, divisor, n);
    case DType::kFloat16:
      return AddFloat16(sum, in, divisor, n);
    case DType::kUInt8:
    case DType::kInt8:
      return AddInt8(sum, in, n);
    case DType::kInt32:
      return AddInt32(sum, in, n);
    case DType::kInt64:
      return AddInt64(sum, in, n);
    case DType::kInt8x128:
    case DType::kInt4x128:
      return;  // blocks are decoded before they are reduced
  }
}

void WideBegin(DType t, void* wide, const void* a, const void* b, size_t n) {
  if (IsInteger(t)) {
    return WithInteger(t, [=](auto zero) {
      using T = decltype(zero);
      for (size_t i = 0; i < n; ++i) Store<WiderOf<T>>(wide, i, Sum<T>(a, b, i));
    });
  }
  if (t == DType::kFloat32) return BeginFloat32(wide, a, b, n);
  t == DType::kBFloat16 ? BeginBFloat16(wide, a, b, n) : BeginFloat16(wide, a, b, n);
}

void WideAdd(DType t, void* wide, const void* in, size_t n) {
  if (IsInteger(t)) {
    return WithInteger(t, [=](auto zero) {
      using Wide = WiderOf<decltype(zero)>;
      for (size_t i = 0; i < n; ++i) {
        Store<Wide>(wide, i, Load<Wide>(wide, i) + Load<decltype(zero)>(in, i));
      }
    });
  }
  if (t == DType::kFloat32) return WideAddFloat32(wide, in, n);
  t == DType::kBFloat16 ? WideAddBFloat16(wide, in, n) : WideAddFloat16(wide, in, n);
}

void WideEnd(DType t, void* last, const void* wide, int divisor, size_t n) {
  if (IsInteger(t)) {
    return WithInteger(t, [=](auto zero) {
      using T = decltype(zero);
      for (size_t i = 0; i < n; ++i) {
        Store<T>(last, i, Quotient<T>(Load<WiderOf<T>>(wide, i) + Load<T>(last, i), divisor));
      }
    });
  }
  if (t == DType::kFloat32) return EndFloat32(last, wide, divisor, n);
  t == DType::kBFloat16 ? EndBFloat16(last, wide, divisor, n) : EndFloat16(last, wide, divisor, n);
}

void Scale(DType t, void* values, const void* of, int times, int by, size_t n) {
  if (IsInteger(t)) {
    if (times != 1) return;
    return WithInteger(t, [=](auto zero) {
      using T = decltype(zero);
      for (size_t i = 0; i < n; ++i) {
        const WiderOf<T> sum = of == nullptr ? Load<T>(values, i) : Load<WiderOf<T>>(of, i);
        Store<T>(values, i, Quotient<T>(sum, by));
      }
    });
  }
  switch (t) {
    case DType::kFloat32:
      return ScaleFloat32(values, of, times, by, n);
    case DType::kFloat64:
      return ScaleFloat64(values, of, times, by, n);
    case DType::kBFloat16:
      return ScaleBFloat16(values, of, times, by, n);
    case DType::kFloat16:
      return ScaleFloat16(values, of, times, by, n);
    default:  // the codec scales blocks, and integers are handled above
      return;
  }
}

}  // namespace core
}  // namespace byteps
