// Values of half types as fp32, and rounded back to nearest even.
//
// A half type is worked on in the upper half of a word; below it there is anything
// when it has been rounded, and nothing when it is read.
#ifndef BYTEPS_BASE_HALF_WORDS_H_
#define BYTEPS_BASE_HALF_WORDS_H_

#include <cstdint>
#include <cstring>

#include "byteps/base/clones.h"

namespace byteps {
namespace core {

inline uint32_t WordOf(float f) {
  uint32_t u;
  memcpy(&u, &f, sizeof(u));
  return u;
}

inline float FloatOf(uint32_t u) {
  float f;
  memcpy(&f, &u, sizeof(f));
  return f;
}

struct BFloat16Words {
  static float FromWord(uint32_t u) { return FloatOf(u); }

  static uint32_t ToWord(float f) {
    const uint32_t u = WordOf(f);
    // Adding half of the last kept place, less one when that place is even, rounds
    // to nearest even; a NaN would turn into infinity and is kept apart.
    const uint32_t rounded = u + 0x7fff + ((u >> 16) & 1);
    const uint32_t nan = u | 0x400000;
    return f != f ? nan : rounded;
  }
};

struct Float16Words {
  static float FromWord(uint32_t h) {
    const uint32_t sign = h & 0x80000000;
    const uint32_t magnitude = (h & 0x7fff0000) >> 3;
    const uint32_t exponent = magnitude & (0x1fu << 23);
    const uint32_t normal = magnitude + (112u << 23);
    const uint32_t special = magnitude + (224u << 23);  // infinity and NaN
    // A subnormal is its mantissa times 2^-24: put it below the implicit bit of
    // 2^-14 and take that bit away again.
    const float subnormal = FloatOf(magnitude + (113u << 23)) - FloatOf(113u << 23);
    uint32_t u = exponent == (0x1fu << 23) ? special : normal;
    u = exponent == 0 ? WordOf(subnormal) : u;
    return FloatOf(u | sign);
  }

  static uint32_t ToWord(float f) {
    const uint32_t u = WordOf(f);
    const uint32_t sign = u & 0x80000000;
    const uint32_t a = u & 0x7fffffff;
    // From 65536 on: infinity, or a quiet NaN.  (65520..65536 overflow by rounding.)
    const uint32_t special = a > 0x7f800000 ? 0x7e00 : 0x7c00;
    // Below 2^-14 the sum with 0.5 has its last place at 2^-24, the last place of a
    // subnormal, so the addition itself rounds to nearest even.
    const uint32_t subnormal = WordOf(FloatOf(a) + 0.5f) - WordOf(0.5f);
    const uint32_t normal = (a - (112u << 23) + 0xfff + ((a >> 13) & 1)) >> 13;
    uint32_t r = a >= (143u << 23) ? special : normal;
    r = a < (113u << 23) ? subnormal : r;
    return r << 16 | sign;
  }
};

// A value of a half type as it is stored.
template <typename Words>
BYTEPS_INLINE inline float FromHalf(uint16_t bits) {
  return Words::FromWord(static_cast<uint32_t>(bits) << 16);
}

template <typename Words>
BYTEPS_INLINE inline uint16_t ToHalf(float value) {
  return static_cast<uint16_t>(Words::ToWord(value) >> 16);
}

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_BASE_HALF_WORDS_H_
