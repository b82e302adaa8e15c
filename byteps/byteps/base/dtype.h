// Element types that can be summed, and the form in which they travel.
#ifndef BYTEPS_BASE_DTYPE_H_
#define BYTEPS_BASE_DTYPE_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace byteps {
namespace core {

// The values are part of the wire format.
enum class DType : uint8_t {
  kFloat32 = 0,
  kFloat64 = 1,
  kFloat16 = 2,
  kUInt8 = 3,
  kInt32 = 4,
  kInt8 = 5,
  kInt64 = 6,
  kBFloat16 = 7,
  kInt8x128 = 8,  // blocks (base/block_codec.h): one is an element
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

// False if no element type has this name.
inline bool ParseDType(const std::string& name, DType* t) {
  for (int i = 0; i < kNumDTypes; ++i) {
    if (name == NameOf(static_cast<DType>(i))) {
      *t = static_cast<DType>(i);
      return true;
    }
  }
  return false;
}

// Types that are summed in fp32 and rounded once.
inline bool IsHalf(DType t) { return t == DType::kFloat16 || t == DType::kBFloat16; }

// Types whose elements are blocks of values.
inline bool IsBlock(DType t) { return t == DType::kInt8x128 || t == DType::kInt4x128; }

// Values of an element.
inline size_t ValuesOf(DType t) { return IsBlock(t) ? kBlockValues : 1; }

// Values in so many bytes.
inline uint64_t ValuesIn(DType t, uint64_t bytes) { return bytes / SizeOf(t) * ValuesOf(t); }

// Whether workers can hold parameters of this type that servers update.
inline bool IsHeld(DType t) { return t == DType::kFloat32 || IsHalf(t); }

// Whether gradients of this type can be what servers update parameters by.
inline bool IsUpdated(DType t) { return IsHeld(t) || IsBlock(t); }

// In which an update answers gradients of this type: parameters, or, of blocks, what is added to
// those that workers hold.
inline DType AnswerOf(DType t) { return IsBlock(t) ? DType::kInt8x128 : t; }

// Bytes of the answer to so many bytes of gradients.
inline uint64_t AnswerBytes(DType t, uint64_t bytes) {
  return bytes / SizeOf(t) * SizeOf(AnswerOf(t));
}

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_BASE_DTYPE_H_
