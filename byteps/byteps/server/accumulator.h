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

// The sum of one round, as its pushes come.
//
// How pushes are added.
struct AdditionRule {
  bool in_order = false;      // of ranks, however they come
  bool wide_float32 = true;   // more than two of fp32 meet in fp64
  bool keeps_memory = false;  // of one push, for TakeSpare
  // Of blocks with feedback: what rounding lost of the sum before, for each value.
  uint16_t* lost = nullptr;
  const Chance* chance = nullptr;  // of blocks that are rounded by it
};

// Pushes are added from where they were received.  Where there are more than two of a half type or
// of fp32, they meet in a wider accumulator and are rounded once (reducer.h).  Blocks of few bits
// wait for each other, and are added several at a time (base/block_codec.h): a sum of up to
// kAtOnce pushes needs no accumulator.  Where servers update by them, their sum stays fp32.
class Accumulator {
 public:
  // Takes the push of a member over: adds it now or, in order, once those before it were added.
  void Take(const Declaration& declaration, const AdditionRule& rule, size_t member,
            SharedBytes values, Scratch* scratch);

  // No more pushes will come, and at least one did: makes the sum of those that have.  An average
  // is of so many, and a sum is scaled as if all members had pushed (reducer.h).
  void Close(const Declaration& declaration, const AdditionRule& rule, Scratch* scratch);

  // Instead of adding: what another server has added up.
  void Put(SharedBytes sum, Scratch* scratch);

  // Pushes that were added.
  size_t added() const { return added_; }
  // The sum, once all were added: in the memory of one of them.  What replaces it is sent instead.
  SharedBytes& sum() { return sum_; }
  // The memory of another push, or nothing.
  SharedBytes TakeSpare() { return std::move(spare_); }
  // Lets go of all memory; what was added still counts.
  void Clear(Scratch* scratch);

 private:
  void Add(const Declaration& declaration, const AdditionRule& rule, SharedBytes values,
           Scratch* scratch);
  // `divisor`: of the sum, which this push completes; 0: it does not.
  void AddBlocks(DType t, float divisor, const AdditionRule& rule, SharedBytes values,
                 Scratch* scratch);
  // The same, where the sum is fp32.
  void AddGradients(DType t, int divisor, SharedBytes values);
  // Those of them that wait, to sum_.
  void FlushGradients(DType t, int divisor);
  // Those that wait, to sum_.
  void EndBlocks(DType t, float divisor, const AdditionRule& rule, Scratch* scratch);
  // The blocks that wait, to be added to `wide`, which `begun` says to hold a sum.
  BlockSum Waiting(DType t, const void** in, float* wide, bool begun) const;

  static constexpr size_t kAtOnce = 8;

  std::vector<SharedBytes> waiting_;  // by member index: not yet their turn
  std::vector<SharedBytes> blocks_;   // that were counted, and are still to be added
  size_t added_ = 0;
  size_t bytes_ = 0;  // of each push
  SharedBytes sum_;   // the first push, then the sum
  SharedBytes spare_;
  Scratch::Block wide_;  // or the sum, while it is accumulated in a wider type
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_ACCUMULATOR_H_
