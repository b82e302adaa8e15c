// What the members of a round want of the optimizer, and what became of it.
#ifndef BYTEPS_SERVER_OPTIMIZER_ROUND_UPDATE_H_
#define BYTEPS_SERVER_OPTIMIZER_ROUND_UPDATE_H_

#include <cstdint>
#include <string>
#include <utility>

#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/observe/metrics.h"
#include "byteps/server/optimizer/partition_state.h"

namespace byteps {
namespace core {

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
  // LOAD_STATE came: it no longer matters what becomes of a step that was tried.
  void Overtake() { overtaken_ = !tried_.empty(); }
  bool overtaken() const { return overtaken_; }

 private:
  std::string MakeStep(SharedBytes* sum);

  const Declaration* const declaration_;
  const uint32_t round_;
  PartitionState* const state_;
  ServerCounters* const counters_;
  // What the members ask for, as the first one said it; its rank, and the operation.
  std::string step_;
  int step_of_ = -1;
  int op_ = 0;
  SharedBytes sums_;
  SharedBytes parameters_;
  std::string tried_;
  bool overtaken_ = false;
  bool updated_ = false;  // the state is what became of the round
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_OPTIMIZER_ROUND_UPDATE_H_
