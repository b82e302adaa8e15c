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

// Optimizer step of one round of a partition: the members' requests, and the outcome.
//
// A PUSH_STEP makes the step when the gradients are summed. After PUSH_NORM or PUSH_TRY the members
// decide about the step (Decide). Functions that may fail return the error, or "".
class RoundUpdate {
 public:
  // All pointers point to objects that outlive this one.
  RoundUpdate(const Declaration* declaration, uint32_t round, PartitionState* state,
              ServerCounters* counters)
      : declaration_(declaration), round_(round), state_(state), counters_(counters) {}

  // Records that a member asks for `step` by `op`. All members must ask for the same as the first
  // one.
  std::string Agree(int rank, int op, const std::string& step);
  // Returns whether Complete can use the spare memory of a push.
  bool keeps_memory() const { return op_ == kPushTry; }

  // Carries out the members' pushes. `sum`: the summed gradients; after a PUSH_STEP, the updated
  // parameters or, for blocks, the differences. `spare`: memory of the size of `sum`, or none.
  std::string Complete(SharedBytes* sum, SharedBytes spare);
  // Does the same as Complete, on a backup. It makes no preview, because a backup answers no
  // member.
  std::string CompleteCopy(SharedBytes* sum);
  // GradientSums for the members, set by Complete; empty after a PUSH_STEP.
  const SharedBytes& sums() const { return sums_; }
  // After a PUSH_TRY, returns the parameters that the speculative step would make.
  const SharedBytes& parameters() const { return parameters_; }
  // Frees these parameters once they are sent. An object that was restored from another server's
  // copy keeps them.
  void ForgetParameters() {
    if (!restored_) parameters_ = SharedBytes();
  }

  // Handles the decision of a member that knows the GradientSums. The first member's decision is
  // carried out, and `sum` is set to the parameters. If that fails, `failure` is set to the error
  // for the other members.
  std::string Decide(int rank, const std::string& step, SharedBytes* sum, std::string* failure);

  // Returns the speculative step, or "".
  const std::string& tried() const { return tried_; }
  // Returns whether the step was made or skipped.
  bool is_updated() const { return updated_; }
  // Returns whether the round's sum holds the answer for the members. Before that, it holds
  // gradients.
  bool has_answer() const { return updated_ || overtaken_; }
  // Returns whether a push with `op` and `step` requests the same as the earlier pushes of the
  // round.
  bool IsLike(int op, const std::string& step) const;

  // ----- copies (recovery/server/backup_link.h)

  // Returns the op by which members pushed; 0 while the gradients are incomplete.
  int pushed_by() const { return pushed_by_; }
  // The request that is carried out: its op, its step, and the rank of the first member that made
  // it.
  int op() const { return op_; }
  const std::string& step() const { return step_; }
  int asked_by() const { return step_of_; }
  // Returns the step that was made or skipped, if the backup does not know it yet; otherwise "".
  std::string Settled() const { return updated_ && !is_told_ ? step_ : ""; }
  // Records that the backup was told the outcome.
  void NoteTold() { is_told_ = is_told_ || updated_; }
  std::string Pack() const;
  // Reads the output of Pack. Returns false if `text` is something else.
  bool Unpack(const std::string& text);
  // Prepares to answer members, on a server that takes over from a lost one. `sum`: as Complete or
  // Decide has left it.
  std::string Restore(const SharedBytes& sum);
  bool is_restored() const { return restored_; }
  // Handles a LOAD_STATE, which replaces the state, so that a speculative step's outcome no longer
  // matters. If `sum` is not null, sets it to the members' answer, in place of the gradients.
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
  // The latest request: its step, the rank of the first member that made it, and its op.
  std::string step_;
  int step_of_ = -1;
  int op_ = 0;
  // Op and step of the pushes. (After a decision, op_ and step_ are those of the decision.)
  int pushed_by_ = 0;
  std::string pushed_step_;
  SharedBytes sums_;
  SharedBytes parameters_;
  std::string tried_;
  bool overtaken_ = false;
  bool updated_ = false;  // the step was made or skipped
  bool restored_ = false;
  bool is_told_ = false;  // the backup was told the outcome
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_OPTIMIZER_ROUND_UPDATE_H_
