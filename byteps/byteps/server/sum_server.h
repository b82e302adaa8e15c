// The server: adds what workers push, and answers with the sums.
//
// Threads of the channel check each request against its tensor's declaration. Each partition
// belongs to an engine thread (SumThread), which keeps its rounds (Rounds). For a tensor with an
// UpdateRule the server keeps the parameters, too (updates.h). A sum is sent to all members from
// the memory into which one of their pushes was received.
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
  // `channel` outlives this. `losses` decides what happens when another node is lost.
  SumServer(const Config& config, Channel* channel,
            std::unique_ptr<ServerLossPolicy> losses = std::make_unique<ServerLossPolicy>());
  // Joins the threads; unanswered requests stay unanswered. Writes the timeline.
  ~SumServer();

  // Sets the rank among the servers once it has joined; -1 until then. Thread-safe.
  void SetRank(int rank);
  int rank() const { return rank_; }

  // Counters so far, and current gauges. Thread-safe.
  std::vector<Metric> Metrics();

  // A packed StatusRecord for the scheduler, with the late workers since the last call.
  std::string Report();

  // Number of sums that only some members have pushed. Thread-safe.
  uint64_t OpenRounds() const { return context_.open_rounds; }

  // Whether a request with this header may have `bytes` of values. If not it will be refused, and
  // its values need no memory (net/link/registration_cache.h). Thread-safe.
  bool Expects(const MessageHead& head, size_t bytes);

  // Takes over a request. Thread-safe; does not block. If there is no memory for it, refuses it,
  // and fails its round.
  void OnMessage(Message* message);

  // The worker of `rank` will push nothing more. Rounds without its push fail with `reason`, now
  // and later. Thread-safe.
  void OnWorkerGone(int rank, const std::string& reason);

  // Events for the loss policy. Thread-safe.
  void OnServerLost(int rank) { losses_->OnServerLost(rank); }
  void OnServerReplaced(int rank) { losses_->OnServerReplaced(rank); }
  // Takes effect before all later requests.
  void SetAbsent(const std::set<int>& ranks) { losses_->SetAbsent(ranks); }

  // ----- for the loss policy

  // A declared tensor, or a partition that was pushed; null if there is none.
  std::shared_ptr<const DeclaredTensor> FindTensor(uint64_t key);
  std::shared_ptr<Partition> FindPartition(uint64_t key);
  // Makes the partition of this key, if its tensor is declared.
  void MakePartition(uint64_t key);
  // Whether any tensor has a rule.
  bool KeepsState();
  // Makes new partitions of a tensor begin with a later round. Returns false if they do already, or
  // the tensor does not exist.
  bool SetFirstRound(uint64_t key, uint32_t round);
  // Ranks have left, or are absent (`may_return`), and hold no tensors any more. Frees tensors
  // without holders, if the policy allows it.
  void DropHolds(const std::set<int>& ranks, bool may_return);

 private:
  void Dispatch(Message* message);
  void OnDeclare(const Message& message);
  // Records a declaration of a worker. Returns why the tensor cannot be summed, or "".
  std::string Declare(int rank, const Declaration& declaration);
  // A worker releases tensors.
  void OnRelease(const Message& message);
  using TensorPtr = std::shared_ptr<DeclaredTensor>;
  using Owed = std::vector<std::shared_ptr<Releasing>>;
  // Frees a tensor if it has no holders and will get none. Adds the answers that are due to `owed`.
  void FreeIfUnused(const TensorPtr& tensor, Owed* owed) PS_REQUIRES(mu_);
  void AnswerReleases(const Owed& owed);
  // Handles a request about a partition.
  void OnRequest(Message* message);
  // Returns why a request cannot be served, or "".
  static std::string Refusal(const Message& message, const DeclaredTensor* tensor, uint64_t index);
  std::shared_ptr<Partition> FindOrMake(const TensorPtr& tensor, uint64_t key) PS_REQUIRES(mu_);
  // A thread has freed a partition.
  void OnFreed(const Partition& partition);
  // "server 0 is out of memory: ...", with what the request wanted.
  std::string NoMemoryFor(const Message& message, const std::bad_alloc& error);

  ServerContext context_;
  MemoryReserve reserve_;
  const std::unique_ptr<ServerLossPolicy> losses_;
  RankGroups groups_;  // groups of all tensors
  std::atomic<int> rank_{-1};
  ps::SharedMutex mu_;
  StateMemory state_memory_ PS_GUARDED_BY(mu_);
  // A tensor changes only with mu_ held for writing, a partition only with its thread's lock. A
  // partition may outlive its tensor for a while (Rounds::Free).
  std::unordered_map<uint64_t, TensorPtr> tensors_ PS_GUARDED_BY(mu_);  // by key
  std::unordered_map<uint64_t, std::shared_ptr<Partition>> partitions_ PS_GUARDED_BY(mu_);
  size_t next_thread_ PS_GUARDED_BY(mu_) = 0;
  std::vector<std::unique_ptr<SumThread>> threads_;  // never changes
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_SERVER_SUM_SERVER_H_
