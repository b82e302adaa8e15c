// Values in blocks of few bits: 128 whole numbers and their scale.
//
//   int8x128   128 bytes: -127..127                          2 bytes: the scale, bfloat16
//   int4x128    64 bytes: -7..7, plus 8                       2 bytes: the scale, bfloat16
//
// In int4x128, byte j has value j in its low half and value j + 64 in its high half.
//
// A value is its number times the scale, exactly, in fp32. The scale is the block's largest
// magnitude divided by 127 or 7, rounded up, so no number overflows. Numbers are rounded to nearest
// even. A block whose largest magnitude is below kLeastMagnitude is zero, so results do not depend
// on how a CPU treats subnormal numbers. A block with an infinity or NaN has a NaN scale, and all
// its values are NaN.
//
// Every CPU and instruction set computes the same bits.
//
// With stochastic rounding numbers are rounded up or down at random, so that the mean is the value.
// The random bits are a function of a seed and of the value's position in its tensor. So they
// depend neither on how the tensor is cut nor on the machine.
//
// With feedback the rounding error of each value is kept in bfloat16, and added to the next value
// at the same position. Blocks that are not finite keep no error.
//
// Parameters that servers update are sent as differences, always in int8x128: the server's value
// minus the value that workers hold. Both sides add the rounded difference with the same
// arithmetic. So a rounding error is part of the next difference, and nothing drifts.
#ifndef BYTEPS_BASE_BLOCK_CODEC_H_
#define BYTEPS_BASE_BLOCK_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "byteps/base/dtype.h"

namespace byteps {
namespace core {

constexpr float kLeastMagnitude = 0x1p-100f;

// Source of random bits for stochastic rounding.
struct Chance {
  uint64_t seed = 0;   // from ChanceSeed
  uint64_t block = 0;  // index of the first block within its tensor
};

// Returns the seed for a round of tensor `name`. `rank`: the worker's rank; -1 for the server's
// answer.
uint64_t ChanceSeed(const std::string& name, uint32_t round, int32_t rank);

// Returns the number of blocks for this many values. The last block is padded with zeros.
constexpr uint64_t BlocksOf(uint64_t values) { return (values + kBlockValues - 1) / kBlockValues; }

// Returns whether values of type `t` can be encoded and decoded: float32, bfloat16 or float16.
bool IsEncoded(DType t);

// Writes BlocksOf(count) blocks of type `t` from values of type `from`. `lost`: the rounding error
// of each value in bfloat16, or null. The memory must not overlap.
void EncodeBlocks(DType t, void* blocks, DType from, const void* values, uint64_t count,
                  uint16_t* lost, const Chance* chance = nullptr);
// Writes `count` values, decoded from blocks of type `t` and rounded to type `to`.
void DecodeBlocks(DType t, const void* blocks, DType to, void* values, uint64_t count);

// Adds several tensors in one pass, in fp32, in the given order.
struct BlockSum {
  DType type;
  const void* const* in;  // `inputs` tensors of `blocks` blocks each
  size_t inputs;
  uint64_t blocks;
  float* wide;  // fp32 sum of an earlier pass, if `begun`; may be null in a single pass
  bool begun;
};

// Computes wide = ((begun ? wide : 0) + in[0] + in[1] + ...) / divisor.
void AddBlocks(const BlockSum& sum, float divisor = 1);
// Computes out = the sum of AddBlocks, rounded to blocks. `out` may be an input. `lost`: as for
// EncodeBlocks, for each value of the blocks.
void EndBlocks(const BlockSum& sum, float divisor, void* out, uint16_t* lost,
               const Chance* chance = nullptr);

// Computes blocks = wanted - held, rounded. `held`: `count` values of type `t`, as workers have
// them. If `moved` is not null, it gets the workers' next values, which AddDifferences will
// compute; `moved` may be `held`.
void EncodeDifferences(DType t, const float* wanted, const void* held, uint64_t count, void* blocks,
                       void* moved);
// Computes out = held + the differences in the blocks, rounded to type `t`. A zero difference keeps
// the bits. `out` may be `held`.
void AddDifferences(DType t, const void* blocks, const void* held, uint64_t count, void* out);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_BASE_BLOCK_CODEC_H_
