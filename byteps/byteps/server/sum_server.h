// The server: adds what the workers push and answers with the sums.
//
// The channel's threads check each request, by the declaration of its tensor.
// Each partition belongs to a thread that adds (SumThread), which keeps its rounds (Rounds).  Of a
// tensor with an UpdateRule the server keeps the parameters as well (updates.h).  A sum is sent to
// all members from where one of their pushes was received.
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
  // Answers by `channel`, which outlives this.  `losses` decides what it does when another node is
  // lost; recovery/server has one that goes on.
  SumServer(const Config& config, Channel* channel,
            std::unique_ptr<ServerLossPolicy> losses = std::make_unique<ServerLossPolicy>());
  // Joins the threads; what they had not answered stays unanswered.  Writes the timeline.
  ~SumServer();

  // It has joined, as this rank among the servers; -1 until then.  Any thread.
  void SetRank(int rank);
  int rank() const { return rank_; }

  // What was counted so far, and what is in flight now.  Any thread.
  std::vector<Metric> Metrics();

  // For the scheduler: a packed StatusRecord.  Tells of late workers since the last call.
  std::string Report();

  // How many sums some members have pushed and others have not.  Any thread.
  uint64_t OpenRounds() const { return context_.open_rounds; }

  // Whether a request, of which `head` has come, may have values of so many bytes.  Those of
  // others need no memory (net/link/registration_cache.h): they will be refused.  Any thread.
  bool Expects(const MessageHead& head, size_t bytes);

  // Takes a request over.  Any thread, several at a time; does not block.  Where there is no memory
  // for it, it is refused, and so is its round.
  void OnMessage(Message* message);

  // The worker of `rank` will push nothing more: rounds that lack its push fail,
  // now and later, for `reason`.  Any thread.
  void OnWorkerGone(int rank, const std::string& reason);

  // News for the policy of losses.  Any thread.
  void OnServerLost(int rank) { losses_->OnServerLost(rank); }
  void OnServerReplaced(int rank) { losses_->OnServerReplaced(rank); }
  // What it changes, it changes before all requests that come afterwards.
  void SetAbsent(const std::set<int>& ranks) { losses_->SetAbsent(ranks); }

  // ----- for the policy of losses

  // A tensor that was declared, or a partition that was pushed; null: there is none.
  std::shared_ptr<const DeclaredTensor> FindTensor(uint64_t key);
  std::shared_ptr<Partition> FindPartition(uint64_t key);
  // Makes the partition of this key, if its tensor is declared.
  void MakePartition(uint64_t key);
  // Whether there are tensors that it updates.
  bool KeepsState();
  // Partitions of a tensor that are made from now on begin with a later round.  False: they do so
  // already, or there is no such tensor.
  bool SetFirstRound(uint64_t key, uint32_t round);
  // Ranks hold nothing any more: they have left, or are absent and may return.  Frees tensors that
  // nobody holds then, as far as the policy lets it.
  void DropHolds(const std::set<int>& ranks, bool may_return);

 private:
  void Dispatch(Message* message);
  void OnDeclare(const Message& message);
  // Takes what the worker of `rank` declares.  Why the tensor cannot be summed; empty if it can.
  std::string Declare(int rank, const Declaration& declaration);
  // A worker holds tensors no more.
  void OnRelease(const Message& message);
  using TensorPtr = std::shared_ptr<DeclaredTensor>;
  using Owed = std::vector<std::shared_ptr<Releasing>>;
  // Frees a tensor if nobody holds it, nor may come to hold it.  Answers are owed for it then.
  void FreeIfUnused(const TensorPtr& tensor, Owed* owed) PS_REQUIRES(mu_);
  void AnswerReleases(const Owed& owed);
  // A request about a partition.
  void OnRequest(Message* message);
  // Why it cannot be served; empty if it can.
  static std::string Refusal(const Message& message, const DeclaredTensor* tensor, uint64_t index);
  std::shared_ptr<Partition> FindOrMake(const TensorPtr& tensor, uint64_t key) PS_REQUIRES(mu_);
  // A thread has let go of it.
  void OnFreed(const Partition& partition);
  // "server 0 is out of memory: ...", about what a request wanted to do.
  std::string NoMemoryFor(const Message& message, const std::bad_alloc& error);

  ServerContext context_;
  MemoryReserve reserve_;
  const std::unique_ptr<ServerLossPolicy> losses_;
  RankGroups groups_;  // of all tensors
  std::atomic<int> rank_{-1};
  ps::SharedMutex mu_;
  StateMemory state_memory_ PS_GUARDED_BY(mu_);
  // A tensor changes with mu_ held alone, a partition with the lock of its thread.  A partition may
  // stay a little longer than its tensor (Rounds::Free).
  std::unordered_map<uint64_t, TensorPtr> tensors_ PS_GUARDED_BY(mu_);  // by key
  std::unordered_map<uint64_t, std::shared_ptr<Partition>> partitions_ PS_GUARDED_BY(mu_);
  size_t next_thread_ PS_GUARDED_BY(mu_) = 0;
  std::vector<std::unique_ptr<SumThread>> threads_;  // always the same
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_SERVER_SUM_SERVER_H_
