// What a server keeps of one partition of parameters: the fp32 values, and their moments.
#ifndef BYTEPS_SERVER_OPTIMIZER_PARTITION_STATE_H_
#define BYTEPS_SERVER_OPTIMIZER_PARTITION_STATE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "byteps/base/protocol.h"
#include "byteps/server/optimizer/update.h"

namespace byteps {
namespace core {

// Of one engine thread, which alone calls it.  Functions that may fail return why they did, or "".
class PartitionState {
 public:
  // Of partition `index` of a tensor whose declaration has a rule, and outlives this.  Takes no
  // memory before the first Load.
  PartitionState(const Declaration* declaration, uint64_t index);

  // fp32 values kept in each slot: as many as the partition has elements.
  size_t size() const { return size_; }

  // Slot 0 is the parameters, which must come first and set the others to 0.  `values` has size()
  // fp32 values.  The first one throws OutOfMemory where there is none.
  std::string Load(uint32_t slot, const char* values);
  // Copies a part of a slot's values, which are size() times 4 bytes.
  std::string Read(uint32_t slot, size_t offset, size_t bytes, char* values) const;

  // `values`, in the tensor's type: gradients before, the updated parameters after.
  std::string Update(const UpdateStep& step, char* values);
  // The parameters that Update would send, to the bit; nothing changes.
  std::string Preview(const UpdateStep& step, const char* gradients, char* parameters) const;
  // Of gradients in the tensor's type.
  GradientSums SumsOf(const char* gradients) const;
  // The parameters, as an update would send them.
  std::string ReadParameters(char* values) const;

 private:
  // Elements of this partition that one group updates.
  struct Run {
    size_t begin;
    size_t end;
    uint32_t group;
    bool counted;
  };

  float* Slot(uint32_t slot) const { return state_.get() + slot * size_; }
  // Calls one of the two, as the rule says, with each run, how many elements it has, and the
  // numbers of its group in this step.
  template <typename OfAdamW, typename OfSgd>
  void ForEachRun(const UpdateStep& step, OfAdamW adamw, OfSgd sgd) const;
  // Of SGD, from the start of a run; null where there is none.
  float* Momentum(const Run& run) const;
  std::string NotLoaded() const;

  const Declaration* const declaration_;
  const UpdateRule& rule_;
  const size_t size_;
  std::vector<Run> runs_;
  std::unique_ptr<float[]> state_;  // slot after slot; null until it is loaded
  bool has_momentum_ = false;       // of SGD: there was a step, or one was loaded
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_OPTIMIZER_PARTITION_STATE_H_
