// Compiled without contraction of products and sums: each operation must round.
#include "byteps/base/block_codec.h"

#include <algorithm>
#include <cstring>

#include "byteps/base/block_codec.h"
#include "byteps/base/dtype.h"
#include "byteps/base/protocol.h"

namespace byteps {
namespace core {
namespace {

constexpr size_t kHalf = kBlockValues / 2;
constexpr uint32_t kMagnitude = 0x7fffffff;
constexpr uint32_t kInfinity = 0x7f800000;
constexpr uint16_t kNaN = 0x7fc0;
// Added to a number of a few bits, this constant leaves that number, rounded to nearest even, in
// the lowest bits of the sum.
constexpr float kRounder = 0x1.8p23f;

// ----- storage of a block's numbers

struct Int8 {
  static constexpr size_t kBytes = kBlockValues;
  static constexpr float kMost = 127;

  BYTEPS_INLINE static void Put(uint8_t* block, const int32_t* numbers) {
    for (size_t i = 0; i < kBlockValues; ++i) block[i] = static_cast<uint8_t>(numbers[i]);
  }
  // Calls use(i, value) for each number i of the block.
  template <typename Use>
  BYTEPS_INLINE static void Get(const uint8_t* block, float scale, Use use) {
    const auto* numbers = reinterpret_cast<const int8_t*>(block);
    for (size_t i = 0; i < kBlockValues; ++i) use(i, static_cast<float>(numbers[i]) * scale);
  }
};

struct Int4 {
  static constexpr size_t kBytes = kHalf;
  static constexpr float kMost = 7;
  static constexpr int kOffset = 8;

  BYTEPS_INLINE static void Put(uint8_t* block, const int32_t* numbers) {
    for (size_t i = 0; i < kHalf; ++i) {
      block[i] = static_cast<uint8_t>((numbers[i] + kOffset) | (numbers[i + kHalf] + kOffset) << 4);
    }
  }
  template <typename Use>
  BYTEPS_INLINE static void Get(const uint8_t* block, float scale, Use use) {
    for (size_t i = 0; i < kHalf; ++i) {
      use(i, static_cast<float>((block[i] & 15) - kOffset) * scale);
      use(i + kHalf, static_cast<float>((block[i] >> 4) - kOffset) * scale);
    }
  }
};

template <typename Form>
BYTEPS_INLINE inline float ScaleOf(const uint8_t* block) {
  uint16_t bits;
  memcpy(&bits, block + Form::kBytes, sizeof(bits));
  return FromHalf<BFloat16Words>(bits);
}

// Decodes a block into `values`, or adds it to them.
template <typename Form>
BYTEPS_INLINE inline void GetBlock(const uint8_t* block, bool add, float* values) {
  const float scale = ScaleOf<Form>(block);
  if (add) {
    Form::Get(block, scale, [=](size_t i, float value) BYTEPS_INLINE { values[i] += value; });
  } else {
    Form::Get(block, scale, [=](size_t i, float value) BYTEPS_INLINE { values[i] = value; });
  }
}

template <typename Form>
constexpr size_t kSize = Form::kBytes + sizeof(uint16_t);

// Returns the scale for a block whose largest magnitude has the bits `largest`.
template <typename Form>
BYTEPS_INLINE inline uint16_t ScaleFor(uint32_t largest) {
  if (largest >= kInfinity) return kNaN;
  if (FloatOf(largest) < kLeastMagnitude) return 0;
  return static_cast<uint16_t>((WordOf(FloatOf(largest) / Form::kMost) + 0xffff) >> 16);
}

// Spreads its argument's entropy over all bits.
BYTEPS_INLINE inline uint32_t Mix(uint32_t h) {
  h = (h ^ (h >> 16)) * 0x85ebca6b;
  h = (h ^ (h >> 13)) * 0xc2b2ae35;
  return h ^ (h >> 16);
}

constexpr uint32_t kStride = 0x9e3779b9;  // odd, so that different counts give different products

// Returns the random key of a block.
BYTEPS_INLINE inline uint32_t KeyOf(const Chance& chance, uint64_t block) {
  const auto number = static_cast<uint32_t>(chance.block + block);
  const uint32_t low = Mix(static_cast<uint32_t>(chance.seed) + number * kStride);
  return Mix(low ^ static_cast<uint32_t>(chance.seed >> 32));
}

// Rounds `x` up or down at random, with mean `x`. Whole numbers are unchanged.
BYTEPS_INLINE inline int32_t ByChance(float x, float most, uint32_t key, uint32_t place) {
  // `bits`: a random number from 0 to below 1. It has so few bits that x + bits stays below the
  // next whole number.
  const uint32_t bits = Mix(key + place * kStride) >> 16;
  const float up = (static_cast<float>(static_cast<int32_t>(bits)) + 0.5f) * 0x1p-16f;
  const float sum = std::min(std::max(x, -most), most) + up;
  const auto whole = static_cast<int32_t>(sum);
  return whole - (static_cast<float>(whole) > sum ? 1 : 0);
}

// Encodes a block's values. With error feedback `values` include the losses of earlier rounds, and
// `lost` gets this round's losses. `chance` may be null; `number`: the block's index after
// chance->block.
template <typename Form>
BYTEPS_INLINE inline void PutBlock(uint8_t* block, const float* values, uint16_t* lost,
                                   const Chance* chance, uint64_t number) {
  uint32_t largest = 0;
  for (size_t i = 0; i < kBlockValues; ++i) {
    largest = std::max(largest, WordOf(values[i]) & kMagnitude);
  }
  const uint16_t bits = ScaleFor<Form>(largest);
  memcpy(block + Form::kBytes, &bits, sizeof(bits));
  const float scale = FromHalf<BFloat16Words>(bits);
  const bool is_number = bits != 0 && bits != kNaN;
  int32_t numbers[kBlockValues] = {};
  if (is_number) {
    const float inverse = 1 / scale;
    if (chance == nullptr) {
      for (size_t i = 0; i < kBlockValues; ++i) {
        numbers[i] =
            static_cast<int32_t>(WordOf(values[i] * inverse + kRounder) - WordOf(kRounder));
      }
    } else {
      const uint32_t key = KeyOf(*chance, number);
      for (size_t i = 0; i < kBlockValues; ++i) {
        numbers[i] = ByChance(values[i] * inverse, Form::kMost, key, static_cast<uint32_t>(i));
      }
    }
  }
  Form::Put(block, numbers);
  if (lost == nullptr) return;
  if (bits == kNaN) {
    memset(lost, 0, kBlockValues * sizeof(uint16_t));
    return;
  }
  for (size_t i = 0; i < kBlockValues; ++i) {
    lost[i] = ToHalf<BFloat16Words>(values[i] - static_cast<float>(numbers[i]) * scale);
  }
}

// ----- conversion of stored values to fp32 and back

struct Float32 {
  using Stored = float;
  BYTEPS_INLINE static float Get(float v) { return v; }
  BYTEPS_INLINE static float Put(float v) { return v; }
};

template <typename Words>
struct HalfValues {
  using Stored = uint16_t;
  BYTEPS_INLINE static float Get(uint16_t v) { return FromHalf<Words>(v); }
  BYTEPS_INLINE static uint16_t Put(float v) { return ToHalf<Words>(v); }
};

using BFloat16 = HalfValues<BFloat16Words>;
using Float16 = HalfValues<Float16Words>;

template <typename Form, typename Type>
BYTEPS_INLINE inline void EncodeBlock(uint8_t* block, const typename Type::Stored* stored,
                                      uint16_t* lost, const Chance* chance, uint64_t number) {
  float values[kBlockValues];
  for (size_t i = 0; i < kBlockValues; ++i) values[i] = Type::Get(stored[i]);
  if (lost != nullptr) {
    for (size_t i = 0; i < kBlockValues; ++i) values[i] += FromHalf<BFloat16Words>(lost[i]);
  }
  PutBlock<Form>(block, values, lost, chance, number);
}

template <typename Form, typename Type>
BYTEPS_INLINE inline void EncodeLoop(uint8_t* blocks, const typename Type::Stored* stored,
                                     uint64_t count, uint16_t* lost, const Chance* chance) {
  uint64_t number = 0;
  for (; count >= kBlockValues; count -= kBlockValues, stored += kBlockValues) {
    EncodeBlock<Form, Type>(blocks, stored, lost, chance, number++);
    blocks += kSize<Form>;
    if (lost != nullptr) lost += kBlockValues;
  }
  if (count == 0) return;
  typename Type::Stored filled[kBlockValues] = {};
  uint16_t lost_filled[kBlockValues] = {};
  memcpy(filled, stored, count * sizeof(filled[0]));
  if (lost != nullptr) memcpy(lost_filled, lost, count * sizeof(uint16_t));
  EncodeBlock<Form, Type>(blocks, filled, lost == nullptr ? nullptr : lost_filled, chance, number);
  if (lost != nullptr) memcpy(lost, lost_filled, count * sizeof(uint16_t));
}

template <typename Form, typename Type>
BYTEPS_INLINE inline void DecodeLoop(const uint8_t* blocks, typename Type::Stored* stored,
                                     uint64_t count) {
  for (uint64_t begin = 0; begin < count; begin += kBlockValues, blocks += kSize<Form>) {
    float values[kBlockValues];
    GetBlock<Form>(blocks, false, values);
    const size_t known = std::min<uint64_t>(kBlockValues, count - begin);
    for (size_t i = 0; i < known; ++i) stored[begin + i] = Type::Put(values[i]);
  }
}

template <typename Form>
BYTEPS_INLINE inline void AddBlock(const BlockSum& sum, uint64_t block, float* values) {
  const size_t offset = block * kSize<Form>;
  if (sum.begun) memcpy(values, sum.wide + block * kBlockValues, kBlockValues * sizeof(float));
  for (size_t i = 0; i < sum.inputs; ++i) {
    const uint8_t* const in = static_cast<const uint8_t*>(sum.in[i]) + offset;
    GetBlock<Form>(in, sum.begun || i > 0, values);
  }
}

BYTEPS_INLINE inline void Divide(float* values, float divisor) {
  if (divisor == 1) return;
  const float d = divisor;
  for (size_t i = 0; i < kBlockValues; ++i) values[i] /= d;
}

template <typename Form>
BYTEPS_INLINE inline void AddLoop(const BlockSum& sum, float divisor) {
  for (uint64_t block = 0; block < sum.blocks; ++block) {
    float values[kBlockValues];
    AddBlock<Form>(sum, block, values);
    Divide(values, divisor);
    memcpy(sum.wide + block * kBlockValues, values, sizeof(values));
  }
}

template <typename Form>
BYTEPS_INLINE inline void EndLoop(const BlockSum& sum, float divisor, void* out, uint16_t* lost,
                                  const Chance* chance) {
  for (uint64_t block = 0; block < sum.blocks; ++block) {
    float values[kBlockValues];
    AddBlock<Form>(sum, block, values);
    Divide(values, divisor);
    uint16_t* const kept = lost == nullptr ? nullptr : lost + block * kBlockValues;
    if (kept != nullptr) {
      for (size_t i = 0; i < kBlockValues; ++i) values[i] += FromHalf<BFloat16Words>(kept[i]);
    }
    PutBlock<Form>(static_cast<uint8_t*>(out) + block * kSize<Form>, values, kept, chance, block);
  }
}

// Processes a block of at most kBlockValues values.
template <typename Type>
BYTEPS_INLINE inline void MoveBlock(const uint8_t* block, const typename Type::Stored* held,
                                    size_t count, typename Type::Stored* out) {
  float values[kBlockValues];
  GetBlock<Int8>(block, false, values);
  for (size_t i = 0; i < count; ++i) {
    const typename Type::Stored moved = Type::Put(Type::Get(held[i]) + values[i]);
    out[i] = values[i] == 0 ? held[i] : moved;
  }
}

template <typename Type>
BYTEPS_INLINE inline void AddDifferencesLoop(const uint8_t* blocks,
                                             const typename Type::Stored* held, uint64_t count,
                                             typename Type::Stored* out) {
  for (; count >= kBlockValues; count -= kBlockValues) {
    MoveBlock<Type>(blocks, held, kBlockValues, out);
    blocks += kSize<Int8>;
    held += kBlockValues;
    out += kBlockValues;
  }
  if (count > 0) MoveBlock<Type>(blocks, held, count, out);
}

template <typename Type>
BYTEPS_INLINE inline void EncodeDifferencesLoop(const float* wanted,
                                                const typename Type::Stored* held, uint64_t count,
                                                uint8_t* blocks, typename Type::Stored* moved) {
  for (uint64_t begin = 0; begin < count; begin += kBlockValues, blocks += kSize<Int8>) {
    float values[kBlockValues] = {};
    const size_t known = std::min<uint64_t>(kBlockValues, count - begin);
    for (size_t i = 0; i < known; ++i) {
      values[i] = wanted[begin + i] - Type::Get(held[begin + i]);
    }
    PutBlock<Int8>(blocks, values, nullptr, nullptr, 0);
    if (moved != nullptr) MoveBlock<Type>(blocks, held + begin, known, moved + begin);
  }
}

// These functions instantiate the templates above: a template itself cannot have clones for several
// CPUs.
#define BYTEPS_DIFFERENCES(Type)                                                                \
  BYTEPS_MULTIVERSION void Encode##Type(const float* wanted, const void* held, uint64_t count,  \
                                        uint8_t* blocks, void* moved) {                         \
    EncodeDifferencesLoop<Type>(wanted, static_cast<const Type::Stored*>(held), count, blocks,  \
                                static_cast<Type::Stored*>(moved));                             \
  }                                                                                             \
  BYTEPS_MULTIVERSION void AddTo##Type(const uint8_t* blocks, const void* held, uint64_t count, \
                                       void* out) {                                             \
    AddDifferencesLoop<Type>(blocks, static_cast<const Type::Stored*>(held), count,             \
                             static_cast<Type::Stored*>(out));                                  \
  }
#define BYTEPS_VALUES(Form, Type)                                                                  \
  BYTEPS_MULTIVERSION void Encode##Form##Type(uint8_t* blocks, const void* values, uint64_t count, \
                                              uint16_t* lost, const Chance* chance) {              \
    EncodeLoop<Form, Type>(blocks, static_cast<const Type::Stored*>(values), count, lost, chance); \
  }                                                                                                \
  BYTEPS_MULTIVERSION void Decode##Form##Type(const uint8_t* blocks, void* values,                 \
                                              uint64_t count) {                                    \
    DecodeLoop<Form, Type>(blocks, static_cast<Type::Stored*>(values), count);                     \
  }
#define BYTEPS_BLOCKS(Form)                                                         \
  BYTEPS_VALUES(Form, Float32)                                                      \
  BYTEPS_VALUES(Form, BFloat16)                                                     \
  BYTEPS_VALUES(Form, Float16)                                                      \
  BYTEPS_MULTIVERSION void Add##Form(const BlockSum& sum, float divisor) {          \
    AddLoop<Form>(sum, divisor);                                                    \
  }                                                                                 \
  BYTEPS_MULTIVERSION void End##Form(const BlockSum& sum, float divisor, void* out, \
                                     uint16_t* lost, const Chance* chance) {        \
    EndLoop<Form>(sum, divisor, out, lost, chance);                                 \
  }

BYTEPS_BLOCKS(Int8)
BYTEPS_BLOCKS(Int4)
BYTEPS_DIFFERENCES(Float32)
BYTEPS_DIFFERENCES(BFloat16)
BYTEPS_DIFFERENCES(Float16)

#undef BYTEPS_DIFFERENCES
#undef BYTEPS_BLOCKS
#undef BYTEPS_VALUES

}  // namespace

uint64_t ChanceSeed(const std::string& name, uint32_t round, int32_t rank) {
  const uint64_t of_name = HashBytes(name.data(), name.size(), 0);
  const uint64_t of_round = HashBytes(&round, sizeof(round), of_name);
  return HashBytes(&rank, sizeof(rank), of_round);
}

bool IsEncoded(DType t) { return t == DType::kFloat32 || IsHalf(t); }

void EncodeBlocks(DType t, void* blocks, DType from, const void* values, uint64_t count,
                  uint16_t* lost, const Chance* chance) {
  auto* const out = static_cast<uint8_t*>(blocks);
  const bool is_int8 = t == DType::kInt8x128;
  if (from == DType::kFloat32) {
    (is_int8 ? EncodeInt8Float32 : EncodeInt4Float32)(out, values, count, lost, chance);
  } else if (from == DType::kBFloat16) {
    (is_int8 ? EncodeInt8BFloat16 : EncodeInt4BFloat16)(out, values, count, lost, chance);
  } else {
    (is_int8 ? EncodeInt8Float16 : EncodeInt4Float16)(out, values, count, lost, chance);
  }
}

void DecodeBlocks(DType t, const void* blocks, DType to, void* values, uint64_t count) {
  const auto* const in = static_cast<const uint8_t*>(blocks);
  const bool is_int8 = t == DType::kInt8x128;
  if (to == DType::kFloat32) {
    (is_int8 ? DecodeInt8Float32 : DecodeInt4Float32)(in, values, count);
  } else if (to == DType::kBFloat16) {
    (is_int8 ? DecodeInt8BFloat16 : DecodeInt4BFloat16)(in, values, count);
  } else {
    (is_int8 ? DecodeInt8Float16 : DecodeInt4Float16)(in, values, count);
  }
}

void AddBlocks(const BlockSum& sum, float divisor) {
  (sum.type == DType::kInt8x128 ? AddInt8 : AddInt4)(sum, divisor);
}

void EndBlocks(const BlockSum& sum, float divisor, void* out, uint16_t* lost,
               const Chance* chance) {
  (sum.type == DType::kInt8x128 ? EndInt8 : EndInt4)(sum, divisor, out, lost, chance);
}

void EncodeDifferences(DType t, const float* wanted, const void* held, uint64_t count, void* blocks,
                       void* moved) {
  auto* const out = static_cast<uint8_t*>(blocks);
  if (t == DType::kFloat32) return EncodeFloat32(wanted, held, count, out, moved);
  (t == DType::kBFloat16 ? EncodeBFloat16 : EncodeFloat16)(wanted, held, count, out, moved);
}

void AddDifferences(DType t, const void* blocks, const void* held, uint64_t count, void* out) {
  const auto* const in = static_cast<const uint8_t*>(blocks);
  if (t == DType::kFloat32) return AddToFloat32(in, held, count, out);
  (t == DType::kBFloat16 ? AddToBFloat16 : AddToFloat16)(in, held, count, out);
}

}  // namespace core
}  // namespace byteps
