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

// Decides what a server does when another node is lost. In this base class rounds fail, and the job
// ends; the policy in recovery/server continues the job.
class ServerLossPolicy {
 public:
  virtual ~ServerLossPolicy() = default;

  // Gives the policy its server and the server's context, which outlive the policy. Called once,
  // before all other functions.
  void Attach(SumServer* server, ServerContext* context) {
    server_ = server;
    context_ = context;
  }
  // Makes the policy for the rounds of one thread. It must not outlive this policy. Called for each
  // thread, before the server gets messages.
  virtual std::unique_ptr<RoundLossPolicy> MakeOfRounds(ServerContext* context, Rounds* rounds,
                                                        SumThread* thread) {
    return std::make_unique<RoundLossPolicy>(context, rounds, thread);
  }
  // Called when the server has joined the job.
  virtual void OnJoined() {}

  // ----- on the path of requests

  // Returns whether a message from another server may have values.
  virtual bool ExpectsOfServer(const MessageHead& /*head*/) { return false; }
  virtual void OnServerMessage(Message* /*message*/) {}
  // Serves a request that is about no partition, and that only this policy knows. Returns false for
  // all other requests.
  virtual bool Serve(Message* /*message*/) { return false; }
  // Takes over a request that must wait for its tensor. Returns false if the request need not wait.
  virtual bool Holds(const DeclaredTensor& /*tensor*/, Message* /*message*/) { return false; }
  // Called when a partition is made, with the server's lock held.
  virtual void OnMade(const std::shared_ptr<Partition>& /*partition*/) {}
  // Returns whether a tensor that no worker uses may be freed. Called with the server's lock held.
  virtual bool MayFree(const DeclaredTensor& /*tensor*/) { return true; }
  // copies_state returns whether servers hold copies of each other's state. has_copy returns
  // whether a complete copy of this server's state exists.
  virtual bool copies_state() const { return false; }
  virtual bool has_copy() { return false; }

  // ----- events

  virtual void OnWorkerGone(int /*rank*/) {}
  // Called when another server was lost, or replaced.
  virtual void OnServerLost(int /*rank*/) {}
  virtual void OnServerReplaced(int /*rank*/) {}
  // Sets the ranks of all workers that belong to removed replicas.
  virtual void SetAbsent(const std::set<int>& /*ranks*/) {}

 protected:
  SumServer* server_ = nullptr;
  ServerContext* context_ = nullptr;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_SERVER_LOSS_POLICY_H_
