#ifndef BYTEPS_SERVER_SERVER_LOSS_POLICY_H_
#define BYTEPS_SERVER_SERVER_LOSS_POLICY_H_

#include <memory>
#include <set>

#include "byteps/cluster/channel.h"
#include "byteps/server/declared_tensor.h"
#include "byteps/server/partition.h"
#include "byteps/server/round_loss_policy.h"

namespace byteps {
namespace core {

class SumServer;

// Decides what a server does when another node is lost.  This one does nothing but fail rounds: the
// job ends.  recovery/server has one that goes on.
//
// Any thread may call anything after Attach.
class ServerLossPolicy {
 public:
  virtual ~ServerLossPolicy() = default;

  // Gives the policy its server, which outlives this: called once, before anything else.
  void Attach(SumServer* server, ServerContext* context) {
    server_ = server;
    context_ = context;
  }
  // Makes the policy of one thread's rounds, which this outlives: for one thread after the other,
  // before the server is told anything.
  virtual std::unique_ptr<RoundLossPolicy> MakeOfRounds(ServerContext* context, Rounds* rounds,
                                                        SumThread* thread) {
    return std::make_unique<RoundLossPolicy>(context, rounds, thread);
  }
  // The server has joined the job.
  virtual void OnJoined() {}

  // ----- on the path of requests

  // Whether a message of another server may have values; such a message.
  virtual bool ExpectsOfServer(const MessageHead& /*head*/) { return false; }
  virtual void OnServerMessage(Message* /*message*/) {}
  // Serves a request that is the policy's own, about no partition.  False: it is none.
  virtual bool Serve(Message* /*message*/) { return false; }
  // Takes over a request about a tensor that has to wait.  False: it need not.
  virtual bool Holds(const DeclaredTensor& /*tensor*/, Message* /*message*/) { return false; }
  // A partition is made.  The server's lock is held.
  virtual void OnMade(const std::shared_ptr<Partition>& /*partition*/) {}
  // Whether a tensor that nobody holds may be freed.  The server's lock is held.
  virtual bool MayFree(const DeclaredTensor& /*tensor*/) { return true; }
  // Whether servers have copies of each other's state; whether there is a whole one of this one's.
  virtual bool copies_state() const { return false; }
  virtual bool has_copy() { return false; }

  // ----- news

  virtual void OnWorkerGone(int /*rank*/) {}
  // Another server is lost, or another one has its place.
  virtual void OnServerLost(int /*rank*/) {}
  virtual void OnServerReplaced(int /*rank*/) {}
  // Workers of these ranks, and no others, belong to replicas that were removed.
  virtual void SetAbsent(const std::set<int>& /*ranks*/) {}

 protected:
  SumServer* server_ = nullptr;
  ServerContext* context_ = nullptr;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_SERVER_LOSS_POLICY_H_
