#ifndef BYTEPS_SERVER_SUM_THREAD_H_
#define BYTEPS_SERVER_SUM_THREAD_H_

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "byteps/base/memory_reserve.h"
#include "byteps/base/mutex.h"
#include "byteps/base/stall_watch.h"
#include "byteps/server/declared_tensor.h"
#include "byteps/server/partition.h"
#include "byteps/server/rounds.h"
#include "byteps/server/server_context.h"

namespace byteps {
namespace core {

// Engine thread of a server, and the partitions that belong to it.
//
// It serves one request at a time, in its own thread. If the partition is small and the queue is
// empty, the channel's thread that has received the request serves it, because waking another
// thread would take longer.
class SumThread {
 public:
  // Returns an error such as "server 0 is out of memory: ...", which also names the purpose of the
  // request.
  using OutOfMemoryText = std::function<std::string(const Message&, const std::bad_alloc&)>;

  // `freed`: see Rounds::Free. `losses`: makes the policy of the rounds.
  SumThread(ServerContext* context, size_t number, OutOfMemoryText out_of_memory_text,
            Rounds::Freed freed, ServerLossPolicy* losses);
  // Joins the thread. Requests that it has not served stay unanswered.
  ~SumThread();

  // Thread-safe, like all functions down to Call.
  //
  // Serves a request that has passed HasForm (request_form.h), now or later.
  void Serve(std::shared_ptr<Partition> partition, Message message);
  // See RoundLossPolicy.
  void OnWorkerGone(int rank, const std::string& reason);
  // See Rounds::Release and Rounds::Free.
  void Release(std::shared_ptr<const DeclaredTensor> tensor, int rank);
  void Free(std::vector<std::shared_ptr<Partition>> partitions);
  // Fails the open rounds of a tensor.
  void FailAll(std::shared_ptr<const DeclaredTensor> tensor, const std::string& reason);
  // Runs `work` after all queued tasks. If memory was too short for it, runs it again, if
  // `may_be_repeated`.
  void Call(std::function<void()> work, bool may_be_repeated = false);

  // ----- only within a task of this thread

  // (Clang cannot see that a task holds the lock.)
  //
  // Runs `work`. If `work` throws, runs `failed`, for which memory is reserved.
  template <typename Work, typename Failed>
  void Survive(const Work& work, const Failed& failed) noexcept {
    reserve_.Survive(work, failed);
  }
  // Serves the requests that arrived while the partition was held. Stops if it is held again.
  void ServeHeld(Partition* partition) PS_NO_THREAD_SAFETY_ANALYSIS;

  size_t queued() { return queue_.Size(); }

 private:
  using Clock = Rounds::Clock;

  struct Task {
    std::shared_ptr<Partition> partition;  // null: the task has no request
    Message message;
    int64_t received = 0;        // time (SteadyNs) at which the request arrived
    std::function<void()> work;  // null, in a task without a request: only checks for late rounds
    bool may_be_repeated = false;
  };

  void Queue(Task task);
  // Serves a small request at once, in the calling thread, if the queue is empty. Returns whether
  // it has served the request.
  bool ServeHere(Task* task);
  void Run();
  void Do(Task* task) noexcept PS_REQUIRES(mu_);
  void HandleRequest(Task* task) PS_REQUIRES(mu_);
  // Answers the workers that wait for a failed task.
  void OnFailure(Task* task, const std::exception& error) PS_REQUIRES(mu_);
  // Fails rounds whose deadline was before `as_of`. All requests that arrived before `as_of` must
  // have been served. Returns false if memory was too short.
  bool FailLate(Clock::time_point as_of) noexcept PS_REQUIRES(mu_);
  void LookAtLate(Clock::time_point as_of) PS_REQUIRES(mu_);
  // Checks for a new stall of this process.
  void NoteStall() PS_REQUIRES(mu_);
  Clock::time_point NextLook() const PS_REQUIRES(mu_);

  ServerContext* const context_;
  const OutOfMemoryText out_of_memory_text_;
  BlockingQueue<Task> queue_;
  std::atomic<size_t> waiting_{0};  // number of tasks that are queued and not done
  ps::Mutex mu_;                    // held while a task is served
  Rounds rounds_ PS_GUARDED_BY(mu_);
  // Time of the next check for late rounds if the queue stays empty.
  Clock::time_point looks_at_ PS_GUARDED_BY(mu_) = Clock::time_point::max();
  // The last pause of this process, as seen when a round was late.
  ps::StallWatch::Stall stall_ PS_GUARDED_BY(mu_);
  MemoryReserve reserve_;
  std::thread thread_;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_SUM_THREAD_H_
