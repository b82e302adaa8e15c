// PartitionState: parameters and moments of one partition, as a server keeps them.
#ifndef BYTEPS_SERVER_OPTIMIZER_PARTITION_STATE_H_
#define BYTEPS_SERVER_OPTIMIZER_PARTITION_STATE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "byteps/base/protocol.h"

namespace byteps {
namespace core {

// What a server keeps of one partition of parameters: the fp32 values, and their moments; and,
// where gradients come in blocks, what workers hold, since they are sent what is to be added to
// that.

// Of one engine thread, which alone calls it.  Functions that may fail return why they did, or "".
class PartitionState {
 public:
  // Of partition `index` of a tensor whose declaration has a rule, and outlives this.  Takes no
  // memory before the first Load.
  PartitionState(const Declaration* declaration, uint64_t index);

  // fp32 values kept in each slot: as many as the partition has.
  size_t size() const { return size_; }
  // Of what Update, Preview and Stay answer.
  size_t answer_bytes() const { return answer_bytes_; }
  bool is_loaded() const { return state_ != nullptr; }
  // Why nothing can be done before that; "" if it is.
  std::string NotLoaded() const;
  // Whether moments may be anything else than 0: there was a step, or they were loaded.
  bool has_moments() const { return has_momentum_; }

  // Slot 0 is the parameters, which must come first and set the others to 0, and what workers hold
  // to the same, rounded.  The slot behind those of the rule is what they hold.  `values` has
  // size() fp32 values.  The first one throws OutOfMemory where there is none.
  std::string Load(uint32_t slot, const char* values);
  // Copies a part of a slot's values, which are size() times 4 bytes.
  std::string Read(uint32_t slot, size_t offset, size_t bytes, char* values) const;

  // `gradients`, in the tensor's type, or, of blocks, in fp32, are used up.  `answer`, which may be
  // the same memory where it is no blocks: the updated parameters, or what workers add to theirs.
  std::string Update(const UpdateStep& step, char* gradients, char* answer);
  // What Update would answer, to the bit; nothing changes.
  std::string Preview(const UpdateStep& step, const char* gradients, char* answer) const;
  // What a step answers that changes nothing: the parameters, or that nothing is to be added.
  std::string Stay(char* answer) const;
  // Of gradients as Update has them.
  GradientSums SumsOf(const char* gradients) const;

 private:
  // Elements of this partition that one group updates.
  struct Run {
    size_t begin;
    size_t end;
    uint32_t group;
    bool counted;
  };

  float* Slot(uint32_t slot) const { return state_.get() + slot * size_; }
  char* Held(size_t value) const { return held_.get() + value * SizeOf(rule_.held); }
  void LoadHeld(const char* values);
  void ReadHeld(size_t offset, size_t bytes, char* values) const;
  // Calls one of the two, as the rule says, with what of each run lies between two elements, how
  // many that are, and the numbers of its group in this step.
  template <typename OfAdamW, typename OfSgd>
  void ForEachRun(const UpdateStep& step, size_t begin, size_t end, OfAdamW adamw, OfSgd sgd) const;
  // Of some elements.  `gradients`, and the parameters that take their place, begin with the first.
  void UpdateSome(const UpdateStep& step, size_t begin, size_t end, char* gradients);
  // `parameters` is other memory.
  void PreviewSome(const UpdateStep& step, size_t begin, size_t end, const char* gradients,
                   char* parameters) const;
  // Of SGD, from the start of a run; null where there is none.
  float* Momentum(const Run& run) const;
  const Declaration* const declaration_;
  const UpdateRule& rule_;
  const bool has_blocks_;  // gradients come in blocks
  const DType type_;       // of summed gradients, and of parameters that are no differences
  const size_t size_;
  const size_t answer_bytes_;
  std::vector<Run> runs_;
  std::unique_ptr<float[]> state_;  // slot after slot; null until it is loaded
  std::unique_ptr<char[]> held_;    // by workers; null where they are sent parameters
  bool has_momentum_ = false;       // of SGD: there was a step, or one was loaded
};

// How much optimizer state a server has promised to keep, and may.

// Bytes that server `rank` of `num_servers` keeps of a tensor between steps: its state, what
// workers hold of it where they are sent differences, and the gradients of a step that was tried.
// 0 of one that is summed.
uint64_t StateBytes(const Declaration& declaration, int rank, int num_servers);

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_SERVER_OPTIMIZER_PARTITION_STATE_H_
