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

template <typename T>
inline void AddLoop(void* sum, const void* in, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    Store<T>(sum, i, static_cast<T>(Load<T>(sum, i) + Load<T>(in, i)));
  }
}

template <typename T>
inline void DivideLoop(void* sum, int divisor, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const T v = Load<T>(sum, i);
    if constexpr (std::is_integral<T>::value) {
      // In 64 bits: a group may have more members than a small type can count.
      const int64_t wide = v;
      int64_t q = wide / divisor;
      if (wide < 0 && q * divisor != wide) --q;
      Store<T>(sum, i, static_cast<T>(q));
    } else {
      Store<T>(sum, i, v / static_cast<T>(divisor));
    }
  }
}

BYTEPS_MULTIVERSION void AddFloat32(void* sum, const void* in, size_t n) {
  AddLoop<float>(sum, in, n);
}
BYTEPS_MULTIVERSION void AddFloat64(void* sum, const void* in, size_t n) {
  AddLoop<double>(sum, in, n);
}
// Signed overflow is undefined, unsigned wraps, and the bits are the same.
BYTEPS_MULTIVERSION void AddInt8(void* sum, const void* in, size_t n) {
  AddLoop<uint8_t>(sum, in, n);
}
BYTEPS_MULTIVERSION void AddInt32(void* sum, const void* in, size_t n) {
  AddLoop<uint32_t>(sum, in, n);
}
BYTEPS_MULTIVERSION void AddInt64(void* sum, const void* in, size_t n) {
  AddLoop<uint64_t>(sum, in, n);
}

BYTEPS_MULTIVERSION void WidenBFloat16(float* sum, const void* in, size_t n) {
  for (size_t i = 0; i < n; ++i) sum[i] = FromBFloat16(Load<uint16_t>(in, i));
}
BYTEPS_MULTIVERSION void AddBFloat16(float* sum, const void* in, size_t n) {
  for (size_t i = 0; i < n; ++i) sum[i] += FromBFloat16(Load<uint16_t>(in, i));
}
BYTEPS_MULTIVERSION void NarrowBFloat16(void* out, const float* sum, float divisor, size_t n) {
  for (size_t i = 0; i < n; ++i) Store<uint16_t>(out, i, ToBFloat16(sum[i] / divisor));
}
BYTEPS_MULTIVERSION void WidenFloat16(float* sum, const void* in, size_t n) {
  for (size_t i = 0; i < n; ++i) sum[i] = FromFloat16(Load<uint16_t>(in, i));
}
BYTEPS_MULTIVERSION void AddFloat16(float* sum, const void* in, size_t n) {
  for (size_t i = 0; i < n; ++i) sum[i] += FromFloat16(Load<uint16_t>(in, i));
}
BYTEPS_MULTIVERSION void NarrowFloat16(void* out, const float* sum, float divisor, size_t n) {
  for (size_t i = 0; i < n; ++i) Store<uint16_t>(out, i, ToFloat16(sum[i] / divisor));
}

}  // namespace

void Add(DType t, void* sum, const void* in, size_t n) {
  switch (t) {
    case DType::kFloat32:
      return AddFloat32(sum, in, n);
    case DType::kFloat64:
      return AddFloat64(sum, in, n);
    case DType::kUInt8:
    case DType::kInt8:
      return AddInt8(sum, in, n);
    case DType::kInt32:
      return AddInt32(sum, in, n);
    case DType::kInt64:
      return AddInt64(sum, in, n);
    case DType::kFloat16:
    case DType::kBFloat16:
      return;  // see AddWiden
  }
}

void Divide(DType t, void* sum, int divisor, size_t n) {
  switch (t) {
    case DType::kFloat32:
      return DivideLoop<float>(sum, divisor, n);
    case DType::kFloat64:
      return DivideLoop<double>(sum, divisor, n);
    case DType::kUInt8:
      return DivideLoop<uint8_t>(sum, divisor, n);
    case DType::kInt8:
      return DivideLoop<int8_t>(sum, divisor, n);
    case DType::kInt32:
      return DivideLoop<int32_t>(sum, divisor, n);
    case DType::kInt64:
      return DivideLoop<int64_t>(sum, divisor, n);
    case DType::kFloat16:
    case DType::kBFloat16:
      return;  // see Narrow
  }
}

void Widen(DType t, float* sum, const void* in, size_t n) {
  t == DType::kBFloat16 ? WidenBFloat16(sum, in, n) : WidenFloat16(sum, in, n);
}

void AddWiden(DType t, float* sum, const void* in, size_t n) {
  t == DType::kBFloat16 ? AddBFloat16(sum, in, n) : AddFloat16(sum, in, n);
}

void Narrow(DType t, void* out, const float* sum, int divisor, size_t n) {
  const float d = static_cast<float>(divisor);
  t == DType::kBFloat16 ? NarrowBFloat16(out, sum, d, n) : NarrowFloat16(out, sum, d, n);
}

}  // namespace core
}  // namespace byteps
