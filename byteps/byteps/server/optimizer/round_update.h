#ifndef BYTEPS_SERVER_OPTIMIZER_ROUND_UPDATE_H_
#define BYTEPS_SERVER_OPTIMIZER_ROUND_UPDATE_H_

#include <cstdint>
#include <string>

#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/observe/metrics.h"
#include "byteps/server/optimizer/partition_state.h"

namespace byteps {
namespace core {

// What the members of a round want of the optimizer, and what became of it.
//
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
  // After a PUSH_TRY, until they were sent: the parameters as its step would make them.  Restored
  // ones stay.
  const SharedBytes& parameters() const { return parameters_; }
  void ForgetParameters() {
    if (!restored_) parameters_ = SharedBytes();
  }

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

  // ----- copies of it (recovery/server/backup_link.h)

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
  bool is_restored() const { return restored_; }
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
  bool restored_ = false;
  bool is_told_ = false;  // the backup knows that it is
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_OPTIMIZER_ROUND_UPDATE_H_
