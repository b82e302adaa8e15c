// Element types that can be reduced, types in which they travel, and conversion of half types.
#ifndef BYTEPS_BASE_DTYPE_H_
#define BYTEPS_BASE_DTYPE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace byteps {
namespace core {

// These numbers are part of the wire format.
enum class DType : uint8_t {
  kFloat32 = 0,
  kFloat64 = 1,
  kFloat16 = 2,
  kUInt8 = 3,
  kInt32 = 4,
  kInt8 = 5,
  kInt64 = 6,
  kBFloat16 = 7,
  kInt8x128 = 8,  // blocks (base/block_codec.h); an element is a block
  kInt4x128 = 9,
};
constexpr int kNumDTypes = 10;

constexpr size_t kBlockValues = 128;

inline size_t SizeOf(DType t) {
  switch (t) {
    case DType::kUInt8:
    case DType::kInt8:
      return 1;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kInt8x128:
      return kBlockValues + 2;
    case DType::kInt4x128:
      return kBlockValues / 2 + 2;
  }
  return 0;
}

inline const char* NameOf(DType t) {
  static const char* const names[kNumDTypes] = {"float32",  "float64", "float16", "uint8",
                                                "int32",    "int8",    "int64",   "bfloat16",
                                                "int8x128", "int4x128"};
  return names[static_cast<int>(t)];
}

// Returns false if no type has this name.
inline bool ParseDType(const std::string& name, DType* t) {
  for (int i = 0; i < kNumDTypes; ++i) {
    if (name == NameOf(static_cast<DType>(i))) {
      *t = static_cast<DType>(i);
      return true;
    }
  }
  return false;
}

// Returns whether values of type `t` are summed in fp32 and rounded once.
inline bool IsHalf(DType t) { return t == DType::kFloat16 || t == DType::kBFloat16; }

inline bool IsInteger(DType t) {
  return t == DType::kUInt8 || t == DType::kInt8 || t == DType::kInt32 || t == DType::kInt64;
}

inline bool IsBlock(DType t) { return t == DType::kInt8x128 || t == DType::kInt4x128; }

// Returns the number of values in an element.
inline size_t ValuesOf(DType t) { return IsBlock(t) ? kBlockValues : 1; }

// Returns the number of values in `bytes` bytes.
inline uint64_t ValuesIn(DType t, uint64_t bytes) { return bytes / SizeOf(t) * ValuesOf(t); }

// Returns whether servers can update parameters that workers hold in this type.
inline bool IsHeld(DType t) { return t == DType::kFloat32 || IsHalf(t); }

// Returns whether servers can update parameters from gradients of this type.
inline bool IsUpdated(DType t) { return IsHeld(t) || IsBlock(t); }

// Returns the type of an update's answer to gradients of type `t`: parameters, or, for blocks,
// differences to the parameters that workers hold.
inline DType AnswerOf(DType t) { return IsBlock(t) ? DType::kInt8x128 : t; }

// Returns the size of the answer to `bytes` bytes of gradients.
inline uint64_t AnswerBytes(DType t, uint64_t bytes) {
  return bytes / SizeOf(t) * SizeOf(AnswerOf(t));
}

}  // namespace core
}  // namespace byteps

// Compiles a loop for several instruction sets. The fastest version is chosen when the program
// starts. Loops are written so that the compiler vectorises them.

#if defined(BYTEPS_MULTIVERSION)  // set by the build
#elif defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define BYTEPS_MULTIVERSION \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define BYTEPS_CHOOSES_CLONES
#else
#define BYTEPS_MULTIVERSION
#endif

// Functions that such a loop calls must be inlined. Otherwise they would be compiled once, for the
// oldest instruction set.
#define BYTEPS_INLINE __attribute__((always_inline))

namespace byteps {
namespace core {

// Conversion of half types to fp32 and back, rounded to nearest even.
//
// A half value is in the upper half of a word. The lower half is zero when it is read, and
// undefined after rounding.

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
    // Adding half of the last kept bit (minus one if that bit is even) rounds to nearest even. A
    // NaN would become infinity, so it is handled separately.
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
    // A subnormal is its mantissa times 2^-24. The mantissa is placed below the implicit bit of
    // 2^-14, and that bit is subtracted.
    const float subnormal = FloatOf(magnitude + (113u << 23)) - FloatOf(113u << 23);
    uint32_t u = exponent == (0x1fu << 23) ? special : normal;
    u = exponent == 0 ? WordOf(subnormal) : u;
    return FloatOf(u | sign);
  }

  static uint32_t ToWord(float f) {
    const uint32_t u = WordOf(f);
    const uint32_t sign = u & 0x80000000;
    const uint32_t a = u & 0x7fffffff;
    // 65536 and above: infinity, or a quiet NaN. (65520..65536 overflow by rounding.)
    const uint32_t special = a > 0x7f800000 ? 0x7e00 : 0x7c00;
    // Below 2^-14 the sum with 0.5 has its last bit at 2^-24, as a subnormal has, so the addition
    // itself rounds to nearest even.
    const uint32_t subnormal = WordOf(FloatOf(a) + 0.5f) - WordOf(0.5f);
    const uint32_t normal = (a - (112u << 23) + 0xfff + ((a >> 13) & 1)) >> 13;
    uint32_t r = a >= (143u << 23) ? special : normal;
    r = a < (113u << 23) ? subnormal : r;
    return r << 16 | sign;
  }
};

// Converts a stored value.
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

#endif  // BYTEPS_BASE_DTYPE_H_
