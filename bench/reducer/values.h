// Elements of every type from and to double, by means other than the reducer's.
#ifndef BENCH_REDUCERKIT_VALUES_H_
#define BENCH_REDUCERKIT_VALUES_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "operations.h"

namespace bench {

// Small multiples of every divisor: exact in every type, also after an addition and
// a division, and other ones in each buffer and at each index, up to a period.  None
// is 0: what is divided again and again would become subnormal, which is slow.
constexpr size_t kPeriod = 5;
inline int Value(int buffer, size_t i) {
  return 12 * (1 + static_cast<int>((i * 7 + buffer * 3) % kPeriod));
}

template <typename T>
void StoreAs(char* p, size_t i, double v) {
  const T x = static_cast<T>(v);
  memcpy(p + i * sizeof(T), &x, sizeof(T));
}

template <typename T>
double LoadAs(const char* p, size_t i) {
  T x;
  memcpy(&x, p + i * sizeof(T), sizeof(T));
  return static_cast<double>(x);
}

// The two half types by arithmetic, so that the reducer's own conversions are not
// checked against themselves.  For 0 and normal numbers of few digits.
inline uint16_t PackHalf(DType t, double v) {
  const int mantissa_bits = t == DType::kBFloat16 ? 7 : 10;
  const int bias = t == DType::kBFloat16 ? 127 : 15;
  if (v == 0) return 0;
  int exponent = 0;
  const double fraction = frexp(v, &exponent);  // v = fraction * 2^exponent, 0.5 <= fraction < 1
  const int mantissa = static_cast<int>((fraction * 2 - 1) * (1 << mantissa_bits));
  return static_cast<uint16_t>((exponent - 1 + bias) << mantissa_bits | mantissa);
}

inline double UnpackHalf(DType t, uint16_t h) {
  const int mantissa_bits = t == DType::kBFloat16 ? 7 : 10;
  const int bias = t == DType::kBFloat16 ? 127 : 15;
  if (h == 0) return 0;
  const double mantissa = h & ((1 << mantissa_bits) - 1);
  return ldexp(1 + ldexp(mantissa, -mantissa_bits), (h >> mantissa_bits) - bias);
}

inline void Put(DType t, bool wide, char* p, size_t i, double v) {
  if (wide) return WideSize(t) == 4 ? StoreAs<float>(p, i, v) : StoreAs<double>(p, i, v);
  switch (t) {
    case DType::kFloat32:
      return StoreAs<float>(p, i, v);
    case DType::kFloat64:
      return StoreAs<double>(p, i, v);
    case DType::kUInt8:
      return StoreAs<uint8_t>(p, i, v);
    case DType::kInt8:
      return StoreAs<int8_t>(p, i, v);
    case DType::kInt32:
      return StoreAs<int32_t>(p, i, v);
    case DType::kInt64:
      return StoreAs<int64_t>(p, i, v);
    case DType::kFloat16:
    case DType::kBFloat16: {
      const uint16_t h = PackHalf(t, v);
      memcpy(p + i * sizeof(h), &h, sizeof(h));
    }
  }
}

inline double Get(DType t, bool wide, const char* p, size_t i) {
  if (wide) return WideSize(t) == 4 ? LoadAs<float>(p, i) : LoadAs<double>(p, i);
  switch (t) {
    case DType::kFloat32:
      return LoadAs<float>(p, i);
    case DType::kFloat64:
      return LoadAs<double>(p, i);
    case DType::kUInt8:
      return LoadAs<uint8_t>(p, i);
    case DType::kInt8:
      return LoadAs<int8_t>(p, i);
    case DType::kInt32:
      return LoadAs<int32_t>(p, i);
    case DType::kInt64:
      return LoadAs<int64_t>(p, i);
    case DType::kFloat16:
    case DType::kBFloat16: {
      uint16_t h;
      memcpy(&h, p + i * sizeof(h), sizeof(h));
      return UnpackHalf(t, h);
    }
  }
  return NAN;
}

}  // namespace bench
#endif  // BENCH_REDUCERKIT_VALUES_H_
