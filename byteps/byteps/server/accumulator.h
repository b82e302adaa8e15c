#ifndef BYTEPS_SERVER_ACCUMULATOR_H_
#define BYTEPS_SERVER_ACCUMULATOR_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "byteps/base/block_codec.h"
#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/server/scratch.h"

namespace byteps {
namespace core {

// Rules by which an Accumulator adds pushes.
struct AdditionRule {
  bool in_order = false;      // whether to add in the order of ranks, not of arrival
  bool wide_float32 = true;   // whether to add more than two fp32 values in fp64
  bool keeps_memory = false;  // whether to keep the memory of one push, for TakeSpare
  // Rounding errors of the last sum, one per value, for blocks with feedback; otherwise null.
  uint16_t* lost = nullptr;
  const Chance* chance = nullptr;  // randomness for stochastic rounding of blocks
};

// Sum of one round's pushes, which are added as they arrive.
//
// Pushes are added from the memory into which they were received. More than two values of a half
// type or of fp32 are added in a wider accumulator, and rounded once (reducer.h). Blocks of few
// bits are collected, and several are added together (base/block_codec.h), so that a sum of up to
// kAtOnce pushes needs no accumulator. If a server updates parameters by a sum of blocks, the sum
// stays fp32.
class Accumulator {
 public:
  // Takes over the push of a member. Adds it now or, with `in_order`, after the pushes of all lower
  // ranks. `member`: index of the member in the group.
  void Take(const Declaration& declaration, const AdditionRule& rule, size_t member,
            SharedBytes values, Scratch* scratch);

  // Ends the sum although some pushes are missing. At least one push must have been added. An
  // average is over the pushes that were added. A sum is scaled as if all members had pushed.
  void Close(const Declaration& declaration, const AdditionRule& rule, Scratch* scratch);

  // Replaces the sum by a sum that another server has computed.
  void Put(SharedBytes sum, Scratch* scratch);

  // Number of pushes added.
  size_t added() const { return added_; }
  // Returns the sum, in the memory of one of the pushes. A caller may replace it before it is sent.
  SharedBytes& sum() { return sum_; }
  // Takes the memory of another push, if `keeps_memory`. Empty if there is none.
  SharedBytes TakeSpare() { return std::move(spare_); }
  // Frees all memory. The number of added pushes stays.
  void Clear(Scratch* scratch);

 private:
  void Add(const Declaration& declaration, const AdditionRule& rule, SharedBytes values,
           Scratch* scratch);
  // Adds the blocks of a push. `divisor`: divisor of the sum if this push completes it, otherwise
  // 0.
  void AddBlocks(DType t, float divisor, const AdditionRule& rule, SharedBytes values,
                 Scratch* scratch);
  // Adds the blocks of a push to a sum that stays fp32.
  void AddGradients(DType t, int divisor, SharedBytes values);
  // Adds the collected gradient blocks to sum_.
  void FlushGradients(DType t, int divisor);
  // Ends the sum: adds the collected blocks, and encodes the result into sum_.
  void EndBlocks(DType t, float divisor, const AdditionRule& rule, Scratch* scratch);
  // Returns the collected blocks, as input for AddBlocks. `begun`: whether `wide` already holds a
  // sum.
  BlockSum Waiting(DType t, const void** in, float* wide, bool begun) const;

  static constexpr size_t kAtOnce = 8;

  std::vector<SharedBytes> waiting_;  // pushes that wait for lower ranks, by member index
  std::vector<SharedBytes> blocks_;   // pushes of blocks that count as added, but are not added yet
  size_t added_ = 0;
  size_t bytes_ = 0;  // bytes of a push
  SharedBytes sum_;   // the first push; after an addition, the sum
  SharedBytes spare_;
  Scratch::Block wide_;  // the sum, while accumulated in a wider type
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_ACCUMULATOR_H_
