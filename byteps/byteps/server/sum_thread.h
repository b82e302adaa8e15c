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

// A thread of a server that adds, and the partitions that belong to it.
//
// Serves one request at a time: in its thread or, if the partition is small and nothing waits for
// it, in the channel's thread that has the request, since to wake another takes longer.
class SumThread {
 public:
  // "server 0 is out of memory: ...", about what a request wanted to do.
  using OutOfMemoryText = std::function<std::string(const Message&, const std::bad_alloc&)>;

  // `freed`: see Rounds::Free.  `losses` has the policy of its rounds.
  SumThread(ServerContext* context, size_t number, OutOfMemoryText out_of_memory_text,
            Rounds::Freed freed, ServerLossPolicy* losses);
  // Joins the thread; what it had not served stays unanswered.
  ~SumThread();

  // Any thread may call all of these.
  //
  // Serves a request that has its form (request_form.h), now or later.
  void Serve(std::shared_ptr<Partition> partition, Message message);
  // See RoundLossPolicy.
  void OnWorkerGone(int rank, const std::string& reason);
  // See Rounds::Release and Rounds::Free.
  void Release(std::shared_ptr<const DeclaredTensor> tensor, int rank);
  void Free(std::vector<std::shared_ptr<Partition>> partitions);
  // Rounds of this tensor that are open fail.
  void FailAll(std::shared_ptr<const DeclaredTensor> tensor, const std::string& reason);
  // Does `work` behind all else, once more if there was no memory for it and it `may_be_repeated`.
  void Call(std::function<void()> work, bool may_be_repeated = false);

  // ----- in a task of this thread

  // (Clang cannot see that a task holds the lock.)
  //
  // Does `work`; if that throws, `failed`, for which there is memory.
  template <typename Work, typename Failed>
  void Survive(const Work& work, const Failed& failed) noexcept {
    reserve_.Survive(work, failed);
  }
  // Serves what came while a partition was held, until it is held again.
  void ServeHeld(Partition* partition) PS_NO_THREAD_SAFETY_ANALYSIS;

  size_t queued() { return queue_.Size(); }

 private:
  using Clock = Rounds::Clock;

  struct Task {
    std::shared_ptr<Partition> partition;  // that a request is about; null: this is none
    Message message;
    int64_t received = 0;        // when, in SteadyNs
    std::function<void()> work;  // null: the thread only looks what is late
    bool may_be_repeated = false;
  };

  void Queue(Task task);
  // Serves a request at once, if it is small and nothing waits for this thread.
  bool ServeHere(Task* task);
  void Run();
  void Do(Task* task) noexcept PS_REQUIRES(mu_);
  void HandleRequest(Task* task) PS_REQUIRES(mu_);
  // Tells those who wait for what a task was about that it failed.
  void OnFailure(Task* task, const std::exception& error) PS_REQUIRES(mu_);
  // Those that were due before `as_of`, if all that came until then was served.  False: there was
  // no memory to tell so, and they are looked at again.
  bool FailLate(Clock::time_point as_of) noexcept PS_REQUIRES(mu_);
  void LookAtLate(Clock::time_point as_of) PS_REQUIRES(mu_);
  // Looks whether there was another stall.
  void NoteStall() PS_REQUIRES(mu_);
  Clock::time_point NextLook() const PS_REQUIRES(mu_);

  ServerContext* const context_;
  const OutOfMemoryText out_of_memory_text_;
  BlockingQueue<Task> queue_;
  std::atomic<size_t> waiting_{0};  // tasks that were queued and not done yet
  ps::Mutex mu_;                    // held while something is served
  Rounds rounds_ PS_GUARDED_BY(mu_);
  // When the thread looks what is late, if nothing is queued before.
  Clock::time_point looks_at_ PS_GUARDED_BY(mu_) = Clock::time_point::max();
  // The last one that was known when a round was late.
  ps::StallWatch::Stall stall_ PS_GUARDED_BY(mu_);
  MemoryReserve reserve_;
  std::thread thread_;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_SUM_THREAD_H_
