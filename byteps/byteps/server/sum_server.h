// The server: adds what the workers push and answers with the sums.
//
// The channel's threads check each request, by the declaration of its tensor.
// Each partition belongs to a thread that adds (SumThread), which keeps its rounds (Rounds).  Of a
// tensor with an UpdateRule the server keeps the parameters as well (rounds.h).  A sum is sent to
// all members from where one of their pushes was received.
#ifndef BYTEPS_SERVER_SUM_SERVER_H_
#define BYTEPS_SERVER_SUM_SERVER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
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
#include "byteps/recovery/server/backup_link.h"
#include "byteps/recovery/server/copies.h"
#include "byteps/server/declared_tensor.h"
#include "byteps/server/optimizer/state_memory.h"
#include "byteps/server/partition.h"
#include "byteps/server/server_context.h"
#include "byteps/server/sum_thread.h"

namespace byteps {
namespace core {

// What a request about a partition must look like, by the declaration of its tensor.

// Bytes of values that a request of this operation has; none of an operation that is not the
// tensor's.
std::optional<uint64_t> ValueBytes(int op, const Declaration& declaration, uint64_t index);

// Whether the values and the header are those that `declaration` lets it have.
bool HasForm(const Message& message, const Declaration& declaration, uint64_t index);

class SumServer : private BackupUser {
 public:
  // Answers by `channel`, which outlives this.
  SumServer(const Config& config, Channel* channel);
  // Joins the threads; what they had not answered stays unanswered.  Writes the timeline.
  ~SumServer() override;

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

  // Another server is lost, or another one has its place.  Any thread.
  void OnServerLost(int rank) {
    context_.vacancies.Lost(rank);
    backup_.OnServerLost(rank);
  }
  void OnServerReplaced(int rank) {
    context_.vacancies.Replaced(rank);
    backup_.OnServerReplaced(rank);
  }

  // Workers of these ranks, and no others, are absent: see Rounds::SetAbsent.  Any thread.  What it
  // changes, it changes before all requests that come afterwards.
  void SetAbsent(const std::set<int>& ranks);

 private:
  void Dispatch(Message* message);
  void OnDeclare(const Message& message);
  // Takes what the worker of `rank` declares.  Why the tensor cannot be summed; empty if it can.
  std::string Declare(int rank, const Declaration& declaration);
  // A worker holds tensors no more.
  void OnRelease(const Message& message);
  // A worker has answers, and nothing to push.
  void OnConfirm(const Message& message);
  using TensorPtr = std::shared_ptr<DeclaredTensor>;
  using Owed = std::vector<std::shared_ptr<Releasing>>;
  // Frees a tensor if nobody holds it, nor may come to hold it.  Answers are owed for it then.
  void FreeIfUnused(const TensorPtr& tensor, Owed* owed) PS_REQUIRES(mu_);
  // Ranks hold nothing any more: they have left, or are absent and may return.
  void DropHolds(const std::set<int>& ranks, bool may_return);
  // A worker holds at this server, which comes, whatever it holds.
  void Settle(int rank);
  void AnswerReleases(const Owed& owed);
  // A worker comes from a server that is lost, and says in which rounds it goes on.
  void OnResume(const Message& message);
  void Resume(const Message& message);
  // Why this server, which comes, cannot go on with a tensor that members have made steps of; or
  // "".
  std::string WhyNoState(const Declaration& declaration) const PS_REQUIRES(mu_);
  // Whether there are tensors that a server updates.
  bool KeepsState() PS_REQUIRES_SHARED(mu_);
  // Partitions of tensors that were declared get the state of a server that is lost.
  void AdoptStates();
  void AdoptState(const std::shared_ptr<Partition>& partition, std::shared_ptr<StateCopy> copy)
      PS_REQUIRES(mu_);
  // Of the backup link.
  void InThreadOf(uint64_t key, std::function<void()> task) override;
  void OnCopied(uint64_t key, uint64_t number) override;
  void OnBackup(uint64_t pass) override;
  void OnFetched() override;
  // All others.
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
  BackupLink backup_;
  RankGroups groups_;  // of all tensors
  std::atomic<int> rank_{-1};
  ps::SharedMutex mu_;
  StateMemory state_memory_ PS_GUARDED_BY(mu_);
  // A tensor changes with mu_ held alone, a partition with the lock of its thread.  A partition may
  // stay a little longer than its tensor (Rounds::Free).
  std::unordered_map<uint64_t, TensorPtr> tensors_ PS_GUARDED_BY(mu_);  // by key
  std::unordered_map<uint64_t, std::shared_ptr<Partition>> partitions_ PS_GUARDED_BY(mu_);
  // Ranks of which this server, if it has the place of a lost one, need not await that they resume;
  // and whether it has.
  std::set<int> settled_ PS_GUARDED_BY(mu_);
  bool is_successor_ PS_GUARDED_BY(mu_) = false;
  std::set<int> absent_ PS_GUARDED_BY(mu_);
  size_t next_thread_ PS_GUARDED_BY(mu_) = 0;
  // About tensors that servers update, until this one has met its backup, or has the state that a
  // lost server left.
  std::vector<Message> awaiting_state_ PS_GUARDED_BY(mu_);
  std::vector<std::unique_ptr<SumThread>> threads_;  // always the same
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_SERVER_SUM_SERVER_H_
