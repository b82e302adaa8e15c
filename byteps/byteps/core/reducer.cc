#include "reducer.h"

#include <cstring>
#include <type_traits>

// The loops below are plain so that the compiler vectorises them; where it can,
// it does so for several instruction sets and picks one when the program starts.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define BYTEPS_MULTIVERSION \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define BYTEPS_MULTIVERSION
#endif

namespace byteps {
namespace core {
namespace {

// An element at any address.
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

inline uint32_t Bits(float f) {
  uint32_t u;
  memcpy(&u, &f, sizeof(u));
  return u;
}

inline float Float(uint32_t u) {
  float f;
  memcpy(&f, &u, sizeof(f));
  return f;
}

inline float FromBFloat16(uint16_t h) { return Float(static_cast<uint32_t>(h) << 16); }

inline uint16_t ToBFloat16(float f) {
  const uint32_t u = Bits(f);
  // Adding half of the last kept place, less one when that place is even, rounds
  // to nearest even; a NaN would turn into infinity and is kept apart.
  const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const uint32_t nan = (u >> 16) | 0x40;
  return static_cast<uint16_t>((u & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

inline float FromFloat16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fff) << 13;
  const uint32_t exponent = magnitude & (0x1fu << 23);
  const uint32_t normal = magnitude + (112u << 23);
  const uint32_t special = magnitude + (224u << 23);  // infinity and NaN
  // A subnormal is its mantissa times 2^-24: put it below the implicit bit of
  // 2^-14 and take that bit away again.
  const float subnormal = Float(magnitude + (113u << 23)) - Float(113u << 23);
  uint32_t u = exponent == (0x1fu << 23) ? special : normal;
  u = exponent == 0 ? Bits(subnormal) : u;
  return Float(u | sign);
}

inline uint16_t ToFloat16(float f) {
  const uint32_t u = Bits(f);
  const uint32_t sign = (u >> 16) & 0x8000;
  const uint32_t a = u & 0x7fffffff;
  // From 65536 on: infinity, or a quiet NaN.  (65520..65536 overflow by rounding.)
  const uint32_t special = a > 0x7f800000 ? 0x7e00 : 0x7c00;
  // Below 2^-14 the sum with 0.5 has its last place at 2^-24, the last place of a
  // subnormal, so the addition itself rounds to nearest even.
  const uint32_t subnormal = Bits(Float(a) + 0.5f) - Bits(0.5f);
  const uint32_t normal = (a - (112u << 23) + 0xfff + ((a >> 13) & 1)) >> 13;
  uint32_t r = a >= (143u << 23) ? special : normal;
  r = a < (113u << 23) ? subnormal : r;
  return static_cast<uint16_t>(r | sign);
}

// How the values of an element type are stored, and how they are added.

template <typename T>
struct Plain {
  using Accumulator = T;
  static T Get(const void* p, size_t i) { return Load<T>(p, i); }
  static void Put(void* p, size_t i, T v) { Store<T>(p, i, v); }
};

struct Float32 {
  using Accumulator = double;
  static double Get(const void* p, size_t i) { return Load<float>(p, i); }
  static void Put(void* p, size_t i, double v) { Store<float>(p, i, static_cast<float>(v)); }
};

struct BFloat16 {
  using Accumulator = float;
  static float Get(const void* p, size_t i) { return FromBFloat16(Load<uint16_t>(p, i)); }
  static void Put(void* p, size_t i, float v) { Store<uint16_t>(p, i, ToBFloat16(v)); }
};

struct Float16 {
  using Accumulator = float;
  static float Get(const void* p, size_t i) { return FromFloat16(Load<uint16_t>(p, i)); }
  static void Put(void* p, size_t i, float v) { Store<uint16_t>(p, i, ToFloat16(v)); }
};

// Runs `loop` with the cheapest function that divides by `divisor` exactly as a
// division would: nothing, or the product with the inverse of a power of two.
template <typename A, typename Loop>
inline void WithDivision(int divisor, Loop loop) {
  const A d = static_cast<A>(divisor);
  if (divisor == 1) return loop([](A v) { return v; });
  if ((divisor & (divisor - 1)) == 0) {
    const A inverse = 1 / d;
    return loop([inverse](A v) { return v * inverse; });
  }
  loop([d](A v) { return v / d; });
}

template <typename E>
inline void AddLoop(void* __restrict sum, const void* __restrict in, int divisor, size_t n) {
  WithDivision<typename E::Accumulator>(divisor, [=](auto divide) {
    for (size_t i = 0; i < n; ++i) E::Put(sum, i, divide(E::Get(sum, i) + E::Get(in, i)));
  });
}

// T is unsigned, since signed overflow is undefined; the bits are the same.
template <typename T>
inline void AddIntegerLoop(void* __restrict sum, const void* __restrict in, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    Store<T>(sum, i, static_cast<T>(Load<T>(sum, i) + Load<T>(in, i)));
  }
}

template <typename T>
void DivideIntegers(void* sum, int divisor, size_t n) {
  if (divisor == 1) return;
  for (size_t i = 0; i < n; ++i) {
    // In 64 bits: a group may have more members than a small type can count.
    const int64_t wide = Load<T>(sum, i);
    int64_t q = wide / divisor;
    if (wide < 0 && q * divisor != wide) --q;
    Store<T>(sum, i, static_cast<T>(q));
  }
}

template <typename E>
inline void BeginLoop(typename E::Accumulator* __restrict wide, const void* __restrict a,
                      const void* __restrict b, size_t n) {
  for (size_t i = 0; i < n; ++i) wide[i] = E::Get(a, i) + E::Get(b, i);
}

template <typename E>
inline void WideAddLoop(typename E::Accumulator* __restrict wide, const void* __restrict in,
                        size_t n) {
  for (size_t i = 0; i < n; ++i) wide[i] += E::Get(in, i);
}

template <typename E>
inline void EndLoop(void* __restrict last, const typename E::Accumulator* __restrict wide,
                    int divisor, size_t n) {
  WithDivision<typename E::Accumulator>(divisor, [=](auto divide) {
    for (size_t i = 0; i < n; ++i) E::Put(last, i, divide(wide[i] + E::Get(last, i)));
  });
}

// A template cannot have clones; these are their instances.
#define BYTEPS_ADD(Name, Element)                                                        \
  BYTEPS_MULTIVERSION void Add##Name(void* sum, const void* in, int divisor, size_t n) { \
    AddLoop<Element>(sum, in, divisor, n);                                               \
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
    EndLoop<Name>(last, static_cast<const Name::Accumulator*>(wide), divisor, n);            \
  }

BYTEPS_ADD(Float32, Plain<float>)
BYTEPS_ADD(Float64, Plain<double>)
BYTEPS_ADD(BFloat16, BFloat16)
BYTEPS_ADD(Float16, Float16)
BYTEPS_ADD_INTEGERS(Int8, uint8_t)
BYTEPS_ADD_INTEGERS(Int32, uint32_t)
BYTEPS_ADD_INTEGERS(Int64, uint64_t)
BYTEPS_WIDE(Float32)
BYTEPS_WIDE(BFloat16)
BYTEPS_WIDE(Float16)

#undef BYTEPS_ADD
#undef BYTEPS_ADD_INTEGERS
#undef BYTEPS_WIDE

}  // namespace

DType AccumulatorOf(DType t) {
  if (IsHalf(t)) return DType::kFloat32;
  return t == DType::kFloat32 ? DType::kFloat64 : t;
}

void Add(DType t, void* sum, const void* in, int divisor, size_t n) {
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
      AddInt8(sum, in, n);
      return DivideIntegers<uint8_t>(sum, divisor, n);
    case DType::kInt8:
      AddInt8(sum, in, n);
      return DivideIntegers<int8_t>(sum, divisor, n);
    case DType::kInt32:
      AddInt32(sum, in, n);
      return DivideIntegers<int32_t>(sum, divisor, n);
    case DType::kInt64:
      AddInt64(sum, in, n);
      return DivideIntegers<int64_t>(sum, divisor, n);
  }
}

void WideBegin(DType t, void* wide, const void* a, const void* b, size_t n) {
  if (t == DType::kFloat32) return BeginFloat32(wide, a, b, n);
  t == DType::kBFloat16 ? BeginBFloat16(wide, a, b, n) : BeginFloat16(wide, a, b, n);
}

void WideAdd(DType t, void* wide, const void* in, size_t n) {
  if (t == DType::kFloat32) return WideAddFloat32(wide, in, n);
  t == DType::kBFloat16 ? WideAddBFloat16(wide, in, n) : WideAddFloat16(wide, in, n);
}

void WideEnd(DType t, void* last, const void* wide, int divisor, size_t n) {
  if (t == DType::kFloat32) return EndFloat32(last, wide, divisor, n);
  t == DType::kBFloat16 ? EndBFloat16(last, wide, divisor, n) : EndFloat16(last, wide, divisor, n);
}

}  // namespace core
}  // namespace byteps
