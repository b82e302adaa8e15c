// Values in blocks of few bits: 128 whole numbers and their scale.
//
//   int8x128   128 bytes: -127..127                          2 bytes: the scale, bfloat16
//   int4x128    64 bytes: -7..7, plus 8; byte j has value j   2 bytes: the scale, bfloat16
//              in its low half and value j + 64 in its high one
//
// A value is its number times the scale, exactly, in fp32.  The scale is the block's largest
// magnitude by 127 or 7, rounded up, so that no number overflows; numbers are rounded to nearest
// even.  A block whose largest magnitude is below kLeastMagnitude is zero, so that no result
// depends on how a CPU treats subnormal numbers.  A block with an infinity or a NaN has a
// scale that is NaN, and all of its values are.
//
// Every CPU and every instruction set computes the same bits.
//
// Or numbers are rounded up or down by chance, so that the mean is the value.  Chance is a function
// of a seed and of the value's place in its tensor, so that it does not depend on how the tensor is
// cut, or on what works on it.
//
// With feedback, what rounding loses of a value is kept in bfloat16, and added to the next value
// of the same place.  Of a block that is not finite nothing is kept.
//
// Parameters that servers update come down as differences, always in int8x128: what a server has,
// less what it knows that workers hold.  Both sides add the rounded difference by the same
// arithmetic, so that what rounding loses is a part of the next difference, and nothing drifts.
#ifndef BYTEPS_BASE_BLOCK_CODEC_H_
#define BYTEPS_BASE_BLOCK_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "byteps/base/dtype.h"

namespace byteps {
namespace core {

constexpr float kLeastMagnitude = 0x1p-100f;

// What rounds by chance, where it is not null.
struct Chance {
  uint64_t seed = 0;   // ChanceSeed
  uint64_t block = 0;  // number of the first block in its tensor
};

// Of a sum's round: that of the worker of a rank, of what it pushes, or of the server, -1.
uint64_t ChanceSeed(const std::string& name, uint32_t round, int32_t rank);

// How many blocks hold so many values; the last one is filled up with zeros.
constexpr uint64_t BlocksOf(uint64_t values) { return (values + kBlockValues - 1) / kBlockValues; }

// Types that can be encoded and decoded: float32, bfloat16 and float16.
bool IsEncoded(DType t);

// `blocks`: BlocksOf(count) of type `t`.  `from`: the type of `values`.  `lost`: bfloat16, for each
// value, or null.  The memory must not overlap.
void EncodeBlocks(DType t, void* blocks, DType from, const void* values, uint64_t count,
                  uint16_t* lost, const Chance* chance = nullptr);
// `to`: the type of `values`, to which they are rounded.
void DecodeBlocks(DType t, const void* blocks, DType to, void* values, uint64_t count);

// Sums of several tensors in one pass, in fp32, in the order in which they are given.
struct BlockSum {
  DType type;
  const void* const* in;  // `inputs` tensors of `blocks` blocks
  size_t inputs;
  uint64_t blocks;
  float* wide;  // what was added before, if `begun`; may be null where nothing was, or will be
  bool begun;
};

// wide = ((begun ? wide : 0) + in[0] + in[1] + ...) / divisor
void AddBlocks(const BlockSum& sum, float divisor = 1);
// out = the same, by `divisor`, rounded; `out` may be one of the inputs.  `lost` as above, for each
// value of the blocks.
void EndBlocks(const BlockSum& sum, float divisor, void* out, uint16_t* lost,
               const Chance* chance = nullptr);

// What workers hold: `count` values of type `t`, float32, bfloat16 or float16.
//
// blocks = wanted - held, rounded.  Where `moved` is not null it gets what AddDifferences makes of
// the two; it may be `held`.
void EncodeDifferences(DType t, const float* wanted, const void* held, uint64_t count, void* blocks,
                       void* moved);
// out = held + what the blocks say, rounded to type `t`; what a block says to be 0 leaves the bits
// as they are.  `out` may be `held`.
void AddDifferences(DType t, const void* blocks, const void* held, uint64_t count, void* out);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_BASE_BLOCK_CODEC_H_
