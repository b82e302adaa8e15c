#ifndef BYTEPS_SERVER_ROUND_LOSS_POLICY_H_
#define BYTEPS_SERVER_ROUND_LOSS_POLICY_H_

#include <cstdint>
#include <map>
#include <string>

#include "byteps/cluster/channel.h"
#include "byteps/server/partition.h"
#include "byteps/server/round.h"
#include "byteps/server/server_context.h"

namespace byteps {
namespace core {

class Rounds;
class SumThread;

// Additions to an answer, besides the values of the sum.
struct AnswerNotes {
  std::string lacks;    // PackMembers of the members that the sum lacks
  std::string to_keep;  // used instead of `lacks`, for callers that keep the sum

  const std::string& Of(const Caller& caller) const { return caller.keeps ? to_keep : lacks; }
};

// Decides about the rounds of one SumThread when a node is lost. This base class fails the rounds
// that lack a lost worker's push; the policy in recovery/server continues them.
//
// Called by the same threads, and with the same lock held, as Rounds. Functions on the path of a
// request may fail rounds, but must not drop them.
class RoundLossPolicy {
 public:
  // `rounds`: the rounds that `thread` serves. All three objects outlive this.
  RoundLossPolicy(ServerContext* context, Rounds* rounds, SumThread* thread)
      : context_(context), rounds_(rounds), thread_(thread) {}
  virtual ~RoundLossPolicy() = default;

  // ----- on the path of a push

  // Refuses a request of a worker that takes part in no round. Returns false if the worker does
  // take part.
  virtual bool Refuses(const Partition& /*partition*/, const Message& /*message*/) { return false; }
  // Answers a push whose round already has a sum. Returns false if the round has none.
  virtual bool Answers(Partition* /*partition*/, const Message& /*push*/, int64_t /*received*/) {
    return false;
  }
  virtual void OnBegin(const Partition& /*partition*/, Round* /*round*/) {}
  // Called for every push, before the push is added. If this fails the round, the push is not
  // added.
  virtual void OnPush(Partition* partition, Round* round);
  // Called after a push was added, possibly the last one.
  virtual void OnAdded(Partition* /*partition*/, Round* /*round*/, const Message& /*push*/) {}
  // Returns whether the update by the summed gradients must wait. If so, the policy later calls
  // Rounds::Update.
  virtual bool Holds(Partition* /*partition*/, Round* /*round*/) { return false; }
  // Returns notes to add to the answers of a round. Called before its callers are answered.
  virtual AnswerNotes Describe(Round* /*round*/) { return {}; }
  // Called when a round is dropped, after all members were answered.
  virtual void OnOver(Partition* /*partition*/, Round* /*round*/) {}
  // Returns whether a late round gets more time.
  virtual bool Waits(Partition* /*partition*/, Round* /*round*/,
                     Round::Clock::time_point /*as_of*/) {
    return false;
  }

  // ----- on the path of other requests

  // HoldsStep and HoldsLoad return whether a member's step, or the answer to a member that has
  // loaded state, must wait. If so, the policy later calls ServeStep or MoveState again, or
  // answers.
  virtual bool HoldsStep(Partition* /*partition*/, const Message& /*message*/,
                         const std::string& /*step*/, int64_t /*received*/) {
    return false;
  }
  virtual bool HoldsLoad(Partition* /*partition*/, const Message& /*message*/,
                         int64_t /*received*/) {
    return false;
  }
  // Returns whether another server holds a copy of the state.
  virtual bool copies_state() const { return false; }
  // Serves a request that only the policy knows.
  virtual void Serve(Partition* /*partition*/, Message* message) {
    context_->RefuseUnknown(*message);
  }
  // Called when a partition is freed: drops the policy's data of the partition.
  virtual void OnFreed(Partition* /*partition*/) {}

  // ----- events

  // Called when a worker will push nothing more.
  virtual void OnWorkerGone(int rank, const std::string& reason);

 protected:
  ServerContext* const context_;
  Rounds* const rounds_;
  SumThread* const thread_;

 private:
  std::map<int, std::string> gone_;  // rank -> reason
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_ROUND_LOSS_POLICY_H_
