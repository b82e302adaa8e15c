// SumServer: adds the values that workers push, and answers with the sums.
//
// Threads of the channel check each request against the declaration of its tensor. Each partition
// belongs to an engine thread (SumThread), which keeps the partition's rounds (Rounds). For a
// tensor with an UpdateRule, the server also keeps the parameters (updates.h). A sum is sent to all
// members from the memory into which one of their pushes was received.
#ifndef BYTEPS_SERVER_SUM_SERVER_H_
#define BYTEPS_SERVER_SUM_SERVER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/base/memory_reserve.h"
#include "byteps/base/mutex.h"
#include "byteps/base/protocol.h"
#include "byteps/cluster/channel.h"
#include "byteps/observe/metrics.h"
#include "byteps/server/declared_tensor.h"
#include "byteps/server/optimizer/state_memory.h"
#include "byteps/server/partition.h"
#include "byteps/server/server_context.h"
#include "byteps/server/server_loss_policy.h"
#include "byteps/server/sum_thread.h"

namespace byteps {
namespace core {

class SumServer {
 public:
  // `channel` must outlive this object. `losses` decides what happens when another node is lost.
  SumServer(const Config& config, Channel* channel,
            std::unique_ptr<ServerLossPolicy> losses = std::make_unique<ServerLossPolicy>());
  // Joins the threads; unanswered requests stay unanswered. Writes the timeline.
  ~SumServer();

  // Sets this server's rank among the servers, when the server has joined. Before, rank() returns
  // -1. Thread-safe.
  void SetRank(int rank);
  int rank() const { return rank_; }

  // Returns the counters since the server was made, and the current gauges. Thread-safe.
  std::vector<Metric> Metrics();

  // Returns a packed StatusRecord for the scheduler. It names the workers for which others have
  // waited since the last call.
  std::string Report();

  // Number of sums that only some members have pushed. Thread-safe.
  uint64_t OpenRounds() const { return context_.open_rounds; }

  // Returns whether a request with this head may have `bytes` bytes of values. If not, it will be
  // refused, and its values need no memory (net/link/registration_cache.h). Thread-safe.
  bool Expects(const MessageHead& head, size_t bytes);

  // Takes over a request. If there is no memory to serve it, refuses it and fails its round.
  // Thread-safe; does not block.
  void OnMessage(Message* message);

  // Notes that the worker of `rank` will push nothing more. Rounds that it has not pushed fail with
  // `reason`, now and later. Thread-safe.
  void OnWorkerGone(int rank, const std::string& reason);

  // Events for the loss policy. Thread-safe.
  void OnServerLost(int rank) { losses_->OnServerLost(rank); }
  void OnServerReplaced(int rank) { losses_->OnServerReplaced(rank); }
  // Sets the ranks of all workers that belong to removed replicas. Takes effect before all
  // later requests are served.
  void SetAbsent(const std::set<int>& ranks) { losses_->SetAbsent(ranks); }

  // ----- for the loss policy

  // FindTensor and FindPartition return the declared tensor, or the pushed partition, with this
  // key; null if there is none.
  std::shared_ptr<const DeclaredTensor> FindTensor(uint64_t key);
  std::shared_ptr<Partition> FindPartition(uint64_t key);
  // Makes the partition of this key, if its tensor is declared.
  void MakePartition(uint64_t key);
  // Returns whether any tensor has a rule.
  bool KeepsState();
  // Makes new partitions of a tensor begin with round `round`. Returns false if they already begin
  // with this or a later round, or if the tensor does not exist.
  bool SetFirstRound(uint64_t key, uint32_t round);
  // Records that the workers of these ranks no longer use any tensor: they have left or, with
  // `may_return`, are absent. Frees tensors that no worker uses, if the policy allows it.
  void DropHolds(const std::set<int>& ranks, bool may_return);

 private:
  void Dispatch(Message* message);
  void OnDeclare(const Message& message);
  // Records that a worker declares a tensor. Returns why it cannot be summed, or "".
  std::string Declare(int rank, const Declaration& declaration);
  // Handles a worker's release of tensors.
  void OnRelease(const Message& message);
  using TensorPtr = std::shared_ptr<DeclaredTensor>;
  using Owed = std::vector<std::shared_ptr<Releasing>>;
  // Frees a tensor if no worker uses it, or can still begin to use it. Adds to `owed` the releases
  // that can be answered now.
  void FreeIfUnused(const TensorPtr& tensor, Owed* owed) PS_REQUIRES(mu_);
  void AnswerReleases(const Owed& owed);
  // Handles a request about a partition.
  void OnRequest(Message* message);
  // Returns why a request cannot be served, or "".
  static std::string Refusal(const Message& message, const DeclaredTensor* tensor, uint64_t index);
  std::shared_ptr<Partition> FindOrMake(const TensorPtr& tensor, uint64_t key) PS_REQUIRES(mu_);
  // Called when a thread has freed a partition.
  void OnFreed(const Partition& partition);
  // Returns an error such as "server 0 is out of memory: ...", which also names the purpose of the
  // request.
  std::string NoMemoryFor(const Message& message, const std::bad_alloc& error);

  ServerContext context_;
  MemoryReserve reserve_;
  const std::unique_ptr<ServerLossPolicy> losses_;
  RankGroups groups_;  // groups of all tensors
  std::atomic<int> rank_{-1};
  ps::SharedMutex mu_;
  StateMemory state_memory_ PS_GUARDED_BY(mu_);
  // Tensors by key. A tensor changes only with mu_ held for writing, a partition only with its
  // thread's lock. A partition may outlive its tensor for a while (Rounds::Free).
  std::unordered_map<uint64_t, TensorPtr> tensors_ PS_GUARDED_BY(mu_);  // by key
  std::unordered_map<uint64_t, std::shared_ptr<Partition>> partitions_ PS_GUARDED_BY(mu_);
  size_t next_thread_ PS_GUARDED_BY(mu_) = 0;
  std::vector<std::unique_ptr<SumThread>> threads_;  // never changes
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_SERVER_SUM_SERVER_H_
