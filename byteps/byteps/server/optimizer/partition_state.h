// What a server keeps of one partition of parameters, how much of it there may be, and what the
// members of a round want of the optimizer.
#ifndef BYTEPS_SERVER_OPTIMIZER_PARTITION_STATE_H_
#define BYTEPS_SERVER_OPTIMIZER_PARTITION_STATE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/base/protocol.h"
#include "byteps/observe/metrics.h"
#include "byteps/server/optimizer/update.h"

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

// Not thread-safe.
class StateMemory {
 public:
  explicit StateMemory(const Config& config);

  // Promises memory for the state of a tensor on this server, and, where it has copies, for that of
  // the server before it.  Why there is too little, or "".
  std::string Promise(const Declaration& declaration, int rank, bool copies);
  // The same tensor is freed.
  void Return(const Declaration& declaration, int rank, bool copies);
  uint64_t promised() const { return promised_; }

 private:
  // Bytes that a tensor takes here; `copies`: with those of its copies.
  uint64_t BytesOf(const Declaration& declaration, int rank, bool copies) const;

  const bool is_set_;     // BYTEPS_SERVER_STATE_BYTES
  const uint64_t limit_;  // that, or what there was when this was made
  const int num_servers_;
  uint64_t promised_ = 0;
};

// What the members of a round want of the optimizer, and what became of it.

// Of one round of a partition with an UpdateRule.  A PUSH_STEP is made once the gradients are
// summed.  After a PUSH_NORM or a PUSH_TRY the members say what becomes of the step, by Decide.
// Functions that may fail return why they did, or "".
class RoundUpdate {
 public:
  // All pointers outlive this.
  RoundUpdate(const Declaration* declaration, uint32_t round, PartitionState* state,
              ServerCounters* counters)
      : declaration_(declaration), round_(round), state_(state), counters_(counters) {}

  // A member asks for `step` by `op`, and the first one who does so decides for all.
  std::string Agree(int rank, int op, const std::string& step);
  // Whether Complete has a use for the memory of a push.
  bool keeps_memory() const { return op_ == kPushTry; }

  // The gradients are summed: does what they were pushed for.  After a PUSH_STEP `sum` has the
  // parameters, or, of blocks, what is added to them.  `spare`: memory of as many bytes, or none.
  std::string Complete(SharedBytes* sum, SharedBytes spare);
  // The same at the backup, which answers nobody: nothing is previewed.
  std::string CompleteCopy(SharedBytes* sum);
  // The GradientSums that members wait for, from Complete on; empty after a PUSH_STEP.
  const SharedBytes& sums() const { return sums_; }
  // After a PUSH_TRY, until they were sent: the parameters as its step would make them.
  const SharedBytes& parameters() const { return parameters_; }
  void ForgetParameters() { parameters_ = SharedBytes(); }

  // What a member wants, now that it knows the GradientSums.  The first one has the step made, and
  // `sum` has the parameters; why it failed is left in `failure`, for the others.
  std::string Decide(int rank, const std::string& step, SharedBytes* sum, std::string* failure);

  // The step, once it was tried; else "".
  const std::string& tried() const { return tried_; }
  // Whether the state is what became of the round.
  bool is_updated() const { return updated_; }
  // Whether its sum is what members are answered, and not the gradients.
  bool has_answer() const { return updated_ || overtaken_; }
  // Whether a member asks for what the others have asked for.
  bool IsLike(int op, const std::string& step) const;

  // ----- copies of it (server/backup_link.h)

  // The operation by which members pushed; 0: their gradients are not complete.
  int pushed_by() const { return pushed_by_; }
  // What the first member has asked for.
  int op() const { return op_; }
  const std::string& step() const { return step_; }
  int asked_by() const { return step_of_; }
  // The step that was made or dropped, if the backup was not told of it yet; else "".
  std::string Settled() const { return updated_ && !is_told_ ? step_ : ""; }
  // It was told of it.
  void NoteTold() { is_told_ = is_told_ || updated_; }
  std::string Pack() const;
  // What Pack has packed.  False: it is something else.
  bool Unpack(const std::string& text);
  // There will be members that are answered, at a server that takes over: `sum` is as Complete or
  // Decide left it.
  std::string Restore(const SharedBytes& sum);
  // LOAD_STATE comes: it no longer matters what becomes of a step that was tried.  `sum`, if it is
  // not null, gets what members were or will be answered, in the place of the gradients.
  void Overtake(SharedBytes* sum);
  bool overtaken() const { return overtaken_; }

 private:
  std::string MakeStep(SharedBytes* sum);
  void SumSquares(const SharedBytes& gradients);
  std::string Preview(const SharedBytes& gradients);

  const Declaration* const declaration_;
  const uint32_t round_;
  PartitionState* const state_;
  ServerCounters* const counters_;
  // What the members ask for, as the first one said it; its rank, and the operation.
  std::string step_;
  int step_of_ = -1;
  int op_ = 0;
  // The operation by which they have pushed, and its step: op_ and step_ are of the last word.
  int pushed_by_ = 0;
  std::string pushed_step_;
  SharedBytes sums_;
  SharedBytes parameters_;
  std::string tried_;
  bool overtaken_ = false;
  bool updated_ = false;  // the state is what became of the round
  bool is_told_ = false;  // the backup knows that it is
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_SERVER_OPTIMIZER_PARTITION_STATE_H_
