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

// Fields of an answer with a round's sum, in addition to its values.
struct AnswerNotes {
  std::string lacks;    // PackMembers of those that the sum lacks
  std::string to_keep;  // instead, for callers that keep the sum

  const std::string& Of(const Caller& caller) const { return caller.keeps ? to_keep : lacks; }
};

// Decides what becomes of the rounds of one SumThread when something is lost.  With this one a
// round fails that lacks the push of a worker that is gone; recovery/server has one that goes on.
//
// Called as Rounds is.  Functions on the path of a request may fail rounds, but drop none.
class RoundLossPolicy {
 public:
  // `rounds` are those of `thread`.  All of it outlives this.
  RoundLossPolicy(ServerContext* context, Rounds* rounds, SumThread* thread)
      : context_(context), rounds_(rounds), thread_(thread) {}
  virtual ~RoundLossPolicy() = default;

  // ----- on a push's path

  // Refuses what a worker asks that takes part in no round.  False: it does.
  virtual bool Refuses(const Partition& /*partition*/, const Message& /*message*/) { return false; }
  // Answers a push whose round has its sum already.  False: it has none.
  virtual bool Answers(Partition* /*partition*/, const Message& /*push*/, int64_t /*received*/) {
    return false;
  }
  virtual void OnBegin(const Partition& /*partition*/, Round* /*round*/) {}
  // A push came, and is added if the round has not failed then.
  virtual void OnPush(Partition* partition, Round* round);
  // It was added, perhaps as the last one.
  virtual void OnAdded(Partition* /*partition*/, Round* /*round*/, const Message& /*push*/) {}
  // Whether the update by a round's gradients, which are summed, has to wait.  The policy calls
  // Rounds::Update then.
  virtual bool Holds(Partition* /*partition*/, Round* /*round*/) { return false; }
  // Called before callers of a round are answered.
  virtual AnswerNotes Describe(Round* /*round*/) { return {}; }
  // A round goes, since every member was told what became of it.
  virtual void OnOver(Partition* /*partition*/, Round* /*round*/) {}
  // Whether a round that is late has more time.
  virtual bool Waits(Partition* /*partition*/, Round* /*round*/,
                     Round::Clock::time_point /*as_of*/) {
    return false;
  }

  // ----- on the path of other requests

  // Whether the step that a member asks for, or the state that it has loaded, has to wait.  The
  // policy calls ServeStep or MoveState once more then, or answers it.
  virtual bool HoldsStep(Partition* /*partition*/, const Message& /*message*/,
                         const std::string& /*step*/, int64_t /*received*/) {
    return false;
  }
  virtual bool HoldsLoad(Partition* /*partition*/, const Message& /*message*/,
                         int64_t /*received*/) {
    return false;
  }
  // Whether another server has a copy of the state.
  virtual bool copies_state() const { return false; }
  // A request that is the policy's own.
  virtual void Serve(Partition* /*partition*/, Message* message) {
    context_->RefuseUnknown(*message);
  }
  // A partition is freed with its tensor: the policy drops what it keeps of it.
  virtual void OnFreed(Partition* /*partition*/) {}

  // ----- news

  // This worker will push nothing more.
  virtual void OnWorkerGone(int rank, const std::string& reason);

 protected:
  ServerContext* const context_;
  Rounds* const rounds_;
  SumThread* const thread_;

 private:
  std::map<int, std::string> gone_;  // rank -> why
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_ROUND_LOSS_POLICY_H_
