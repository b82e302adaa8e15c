// PartitionState: parameters and moments of a partition on its server.
#ifndef BYTEPS_SERVER_OPTIMIZER_PARTITION_STATE_H_
#define BYTEPS_SERVER_OPTIMIZER_PARTITION_STATE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "byteps/base/protocol.h"

namespace byteps {
namespace core {

// Parameters of a partition on its server, in fp32, and their moments. If gradients come in blocks,
// workers receive differences. Then the state also has the parameters as workers have them.

// Used by one engine thread only. Functions that may fail return the error, or "".
class PartitionState {
 public:
  // Makes the state of partition `index` of a tensor. The declaration has a rule, and outlives this
  // object. Allocates nothing before the first Load.
  PartitionState(const Declaration* declaration, uint64_t index);

  // Number of values in each slot.
  size_t size() const { return size_; }
  // Number of bytes that Update, Preview and Stay write to `answer`.
  size_t answer_bytes() const { return answer_bytes_; }
  bool is_loaded() const { return state_ != nullptr; }
  // Returns the error for requests that need loaded state, or "".
  std::string NotLoaded() const;
  // Returns whether moments may differ from 0, because a step was made, or because moments were
  // loaded.
  bool has_moments() const { return has_momentum_; }

  // Loads a slot. `values` has size() fp32 values. Slot 0 holds the parameters and must be loaded
  // first. Loading it sets the moments to 0, and the workers' parameters to the same values,
  // rounded. The rule's slots follow, and then a slot for the workers' parameters. The first call
  // may throw OutOfMemory.
  std::string Load(uint32_t slot, const char* values);
  // Copies a range of a slot, which has size() * 4 bytes.
  std::string Read(uint32_t slot, size_t offset, size_t bytes, char* values) const;

  // Makes a step. `gradients` are in the tensor's type, or in fp32 if they came in blocks, and are
  // overwritten. Writes the updated parameters to `answer`, or differences if gradients come in
  // blocks. Without blocks, `answer` may be the memory of `gradients`.
  std::string Update(const UpdateStep& step, char* gradients, char* answer);
  // Writes to `answer` the bits that Update would write, but leaves the state unchanged.
  std::string Preview(const UpdateStep& step, const char* gradients, char* answer) const;
  // Writes the answer of a skipped step: the parameters, or differences of 0.
  std::string Stay(char* answer) const;
  // Returns the GradientSums of gradients in the format that Update takes.
  GradientSums SumsOf(const char* gradients) const;

 private:
  // A range of this partition's elements that one group of the rule updates.
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
  // Calls `adamw` or `sgd`, depending on the rule, for each run of one group between the elements
  // `begin` and `end`. The arguments of a call are the run, its length, and the coefficients of its
  // group in this step.
  template <typename OfAdamW, typename OfSgd>
  void ForEachRun(const UpdateStep& step, size_t begin, size_t end, OfAdamW adamw, OfSgd sgd) const;
  // Updates the elements from `begin` to `end`. `gradients` begins with the gradient of element
  // `begin`. Overwrites the gradients with the parameters.
  void UpdateSome(const UpdateStep& step, size_t begin, size_t end, char* gradients);
  // Computes the same parameters without changing the state. Writes them to `parameters`, which
  // must not overlap other arguments.
  void PreviewSome(const UpdateStep& step, size_t begin, size_t end, const char* gradients,
                   char* parameters) const;
  // Returns the SGD momentum of a run's first element; null if the rule has no momentum.
  float* Momentum(const Run& run) const;
  const Declaration* const declaration_;
  const UpdateRule& rule_;
  const bool has_blocks_;  // gradients come in blocks
  const DType type_;       // type of summed gradients and, without blocks, of answered parameters
  const size_t size_;
  const size_t answer_bytes_;
  std::vector<Run> runs_;
  std::unique_ptr<float[]> state_;  // slot after slot; null until loaded
  std::unique_ptr<char[]> held_;    // parameters as workers hold them; null without blocks
  bool has_momentum_ = false;       // a step was made, or moments were loaded
};

// Returns the number of bytes that server `rank` of `num_servers` keeps for a tensor between steps:
// the state, the workers' parameters if workers receive differences, and the gradients of a
// speculative step. Returns 0 if the tensor has no rule.
uint64_t StateBytes(const Declaration& declaration, int rank, int num_servers);

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_SERVER_OPTIMIZER_PARTITION_STATE_H_
