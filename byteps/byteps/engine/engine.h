// A worker in one job (Engine), with what the threads that push and pull share, and through all
// jobs that its process joins and leaves (Worker).
#ifndef BYTEPS_ENGINE_ENGINE_H_
#define BYTEPS_ENGINE_ENGINE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/base/mutex.h"
#include "byteps/cluster/channel.h"
#include "byteps/cluster/vacancies.h"
#include "byteps/device/device.h"
#include "byteps/engine/declarations.h"
#include "byteps/engine/kept_sums.h"
#include "byteps/engine/operation.h"
#include "byteps/engine/requests.h"
#include "byteps/engine/staged_sum.h"
#include "byteps/observe/metrics.h"

namespace byteps {
namespace core {

// Ranks whose values sums of this worker have lacked, since their replicas were removed.

// Any thread may call anything.
class MissingRanks {
 public:
  void Add(int rank) {
    ps::MutexLock lock(&mu_);
    ranks_.insert(rank);
  }

  // Those that were added since this was called last, ascending.
  std::vector<int> Take() {
    ps::MutexLock lock(&mu_);
    std::vector<int> ranks(ranks_.begin(), ranks_.end());
    ranks_.clear();
    return ranks;
  }

 private:
  ps::Mutex mu_;
  std::set<int> ranks_ PS_GUARDED_BY(mu_);
};

// What the parts of one engine share.
struct Context {
  Context(const Config& config, const Launch& launch, int num_servers, std::unique_ptr<Channel> how,
          WorkerCounters* counted, SpeedMeter* speed);

  // A request about the partition of `request`, which is remembered until the answer.
  Message MakeRequestMessage(Request request);

  Plan plan;
  const double op_timeout_s;
  // For tensors on GPUs: for partitions on their way, for sums that streams wait for, and for small
  // ones.  All jobs of this process share them; each begins anew to count what its tensors want.
  PinnedPool* const pool;
  PinnedPool* const pool_for_streamed;
  PinnedPool* const pool_for_small;
  const std::unique_ptr<Channel> channel;
  WorkerCounters* const counters;
  Operations operations;
  Requests requests;
  MissingRanks missing;
  ServerLoss loss;
  Vacancies vacancies;
  CopyQueues copies;
  StreamedSums streamed;
  SmallSums small;
  // Shared with callbacks of the device's and of the transport's, which may outlive the engine.
  const std::shared_ptr<PushScheduler> scheduler;
  const std::shared_ptr<OperationTrace> trace;
};

// The way of a partition to its server.
//
//   Add ─▶ [the GPU has computed it] ─▶ scheduler ─▶ push loop ─▶ server
//                                         ▲   │ take: pinned memory, or wait for some
//                                         │   │ copy: enqueue it, and go on with another
//                                         └───┘ send: when it is copied
//
// A tensor on a GPU enters the scheduler when its values are there, so that one that is still
// computed holds neither a window nor the stream of copies.  A tensor on the CPU is sent from
// where it lies, and one whose sum streams wait for from its copy, which its caller has enqueued.

class Pusher {
 public:
  // `context` outlives this.
  explicit Pusher(Context* context);

  // Queues all partitions of an operation that has begun.  One that is small may be sent before
  // this returns.  Throws Error when the device fails.
  void Add(const OperationPtr& operation);

  // One of BYTEPS_PUSH_THREAD loops; returns when the scheduler is closed.
  void Loop(int track);

 private:
  // Of an operation whose values, or those of these partitions, are there.
  void AddReady(const OperationPtr& operation, std::vector<Task> tasks);
  // Takes a task one or more stages further.  Never throws: the operation fails instead.
  void Advance(Task task, int track);
  void PrepareFromDevice(Task task, int track);
  void StartCopy(Task task, int track);
  void Send(const Task& task, int track);
  // Whether its server may be told where its sums belong before they come.
  bool OffersPlaces(const Operation& operation) const;
  // `goes`: if not, it is remembered and not sent.  Returns why it could not be sent.
  std::string SendNow(const Task& task, int track, bool goes);
  void Fail(const Task& task, const std::string& error);
  void Drop(const Task& task);

  Context* const context_;
  const int callers_track_;  // of the timeline: what callers send themselves
};

// The way of a sum from its server.
//
// Values of a tensor on the CPU are received straight into it, and the thread that received them
// only counts; those of a tensor on a GPU are received into pinned memory, from which a pull loop
// has them copied: the one that does so already, or else another.  What was received elsewhere,
// since the transport cannot do better or no pinned memory was free, is copied by a pull loop.

class Puller {
 public:
  // `context` outlives this.
  explicit Puller(Context* context);

  // As ChannelUser has them, of what is no declaration.
  char* PlaceFor(const MessageHead& head, size_t bytes);
  void OnAnswer(Message* message);

  // One of BYTEPS_PUSH_THREAD loops; returns when this is closed and nothing is left to do.
  void Loop(int track);
  void Close() { queue_->Close(); }

  size_t queued() { return queue_->Size(); }

 private:
  struct Arrived {
    Request request;
    SharedBytes values;  // empty when they are in request.block
  };
  using Queue = BlockingQueue<Arrived>;

  // Of a PUSH_TRY, the sums that come with the parameters.
  static void KeepSums(const Message& message, const Request& request);
  // Members whose values the sum lacks, as the answer says.
  void NoteMissing(const Message& message, const Request& request);
  // Why an answer cannot be used; empty if it can.
  std::string Refusal(const Message& message, const Request& request);
  // Takes the request that was answered out, and keeps the sum where a server may be lost.
  bool TakeRequest(Message* message, Request* request);
  void KeepSum(Message* message, const Request& request);
  // Of a request that was open until now.  Throws Error.
  void HandleAnswer(Message* message, Request request);
  void OnSum(Message* message, Request request);
  void Fail(const Request& request, const std::string& error);
  void Handle(Arrived* arrived, int track);
  // Of a tensor on the CPU: copies or decodes what came.  False when the operation failed, and
  // nothing may be written.
  bool CopyToOutput(const Arrived& arrived);
  // Of a tensor on a GPU: once there is pinned memory, enqueues the copy from there.
  void MoveToDevice(Arrived* arrived, int track);
  // Leaves the copy of what landed in pinned memory to the thread that gives copies to the GPU
  // now.  False: a pull loop has to.
  bool LeaveCopy(const Request& request);
  CopyQueue::Entry CopyOf(const Request& request, int track);
  CopyQueue* QueueOf(const Request& request);
  // That a copy to the GPU has been enqueued.
  void Begun(const Request& request, int track, int64_t begin);
  // That a partition is through; ends the operation behind its last one.  Throws Error.
  void Count(const Request& request);

  Context* const context_;
  const int receive_track_;             // of the timeline: what needs no pull loop
  const std::shared_ptr<Queue> queue_;  // shared with those who wait for pinned memory
};

// A worker while it is in one job: its declarations, its sums, and the threads that move them.
//
//   PushPull ─▶ Declarations ─▶ Pusher ─▶ channel ─▶ server
//                                                      │
//   Wait ◀── Operations ◀── Puller ◀── channel ◀───────┘
//
// Each part has a lock of its own, which is held for bookkeeping only: never while values are
// copied, memory is pinned, or anything is sent.

// All public functions may be called by any thread, also after Stop; Start and Stop once, by one
// at a time.  Errors are thrown as Error (the job failed) or UsageError (bad call).
class Engine : public ChannelUser {
 public:
  // `counters` and `speed` outlive this.
  Engine(const Config& config, const Launch& launch, int num_servers,
         std::unique_ptr<Channel> channel, WorkerCounters* counters, SpeedMeter* speed);
  ~Engine() override;

  void Start();
  void Stop(bool suspend, const std::string& failure);
  // The first thing that Stop does: waits for what is in flight.
  void AwaitIdle();

  std::vector<TensorPtr> Declare(const std::vector<TensorSpec>& specs);
  void Release(const std::vector<std::string>& names, uint32_t lowest_rank) {
    declarations_.Release(names, lowest_rank);
  }
  int64_t PushPull(const PushPullRequest& request, TensorPtr* known);
  bool Poll(int64_t handle);
  bool IsStreamed(int64_t handle);
  Landing Land(int64_t handle, DeviceStream stream);
  bool WaitFor(int64_t handle, DeviceStream stream, std::chrono::nanoseconds limit);
  bool AwaitEnd(int64_t handle, std::chrono::nanoseconds limit);
  void CallAtEnd(int64_t handle, std::function<void()> then);

  bool failed() { return context_.operations.failed(); }
  // Throws Error when the job failed.
  void Check();
  bool RegistersMemory() const { return context_.channel->RegistersMemory(); }
  const Plan& plan() const { return context_.plan; }
  double link_gbps() const { return context_.channel->link_gbps(); }
  WorkerGauges Gauges();

  // Replicas (docs/design/replicas.md).
  //
  // As the scheduler has told last; without any where it has told nothing.
  ps::ReplicaView Replicas();
  bool is_late() const { return context_.channel->is_late(); }
  void SayReady() { context_.channel->SayReady(); }
  void AskToAdmit(int replica, int life) { context_.channel->AskToAdmit(replica, life); }
  // Tensors of which others wait for the next push of this worker.
  std::vector<std::string> Awaited();
  // Ranks whose values sums have lacked, since this was called last.
  std::vector<int> TakeMissing() { return context_.missing.Take(); }
  // Rounds that this worker has begun of each tensor, and those that another worker says it has.
  ProgressByTensor Rounds() { return declarations_.Rounds(); }
  void SetRounds(const ProgressByTensor& progress) { declarations_.SetRounds(progress); }

  void OnMessage(Message* message) override;
  char* PlaceFor(const MessageHead& head, size_t bytes) override;
  void OnEvent(const ps::MembershipEvent& event) override;
  std::string Report() override;

 private:
  // Makes tensors known to the servers; makes room for one on a GPU.
  std::vector<TensorPtr> Introduce(const std::vector<TensorSpec>& specs);
  TensorPtr Find(const TensorSpec& spec, TensorPtr* known);
  void MakeRoom(const TensorSpec& spec, Tensor* tensor);
  // Whether it is small, its values are there, and nothing else is in flight: then its caller
  // copies it as a whole (staged_sum.h).
  bool IsSmallAndAlone(const Operation& operation);
  void Fail(const std::string& reason);

  // pusher.cc.
  void OnServerLost(int server, const std::string& reason);
  void OnServerReplaced(int server);
  // Tells it in which rounds this worker goes on; what it answers.
  void SayResumes(int server, uint64_t turn);
  void OnResumed(const Message& answer);
  void Give(int server, uint64_t turn, const KeptSum& sum);
  void OnGiven(const Message& answer);
  // Gives a server as many of the sums that wait as may be in flight.
  void GiveNext(int server, uint64_t turn);
  // Tells servers that have no requests of this worker's what it has, as long as it keeps any of
  // their sums; what they answer.
  void Confirm();
  void OnConfirmed(const Message& answer);
  void GoOn(int server, uint64_t turn);
  void PushAgain(Request request);

  // Lets streams go on that wait for sums that failed.  Fails the job where nobody would hear of
  // that.
  void EndFailedStreams();
  // Nothing is received into its memory any more; of one that failed, after AwaitWriters.
  void AbandonPlaces(const Operation& operation);
  // Throws what a failed operation ended with, once nothing writes into its output any more.
  [[noreturn]] void ThrowFailure(const OperationPtr& operation, DeviceStream stream);

  // staged_sum.cc: fails operations that nobody else will.
  void Watch();
  // Why it has to fail now; empty if it has not.
  std::string Verdict(const OperationPtr& operation);
  std::string Silence(const OperationPtr& operation);

  const double peer_timeout_s_;
  const long loops_;
  bool has_awaited_idle_ = false;
  std::atomic<bool> is_over_{false};  // for all nodes: there is nobody to say goodbye to
  Context context_;
  Declarations declarations_;
  Pusher pusher_;
  Puller puller_;
  ps::Mutex replicas_mu_;
  ps::ReplicaView replicas_ PS_GUARDED_BY(replicas_mu_);
  // By tensor, the last round of which this worker heard that others waited for its push.
  std::map<std::string, uint32_t> awaited_ PS_GUARDED_BY(replicas_mu_);
  ps::Mutex failing_mu_;  // held until all that failed is in the timeline
  std::vector<std::thread> threads_;
};

// The worker of this process, through the jobs that it joins and leaves.

// All public functions may be called by any thread; Start and Stop by one at a
// time.  Errors are thrown as Error (the job failed) or UsageError (bad call).
class Worker {
 public:
  Worker() = default;
  ~Worker();

  // Joins the cluster by `channel`; blocks until every node has.
  void Start(const Config& config, const Launch& launch, int num_servers,
             std::unique_ptr<Channel> channel);

  // Waits for what is in flight (no longer than BYTEPS_PEER_TIMEOUT_S), says
  // goodbye, and closes.  Does nothing when not started.  `failure`: why this process ends, if not
  // because its work is done.
  void Stop(bool suspend, const std::string& failure = "");

  // At the end of the process, before its exit status is known: waits for what is in flight, and
  // has the C library call Stop when it is known.  A status other than 0 is a failure.  What
  // operations use must stay until then.
  void StopAtExit();

  bool started() { return engine() != nullptr; }

  // Whether what is pushed should lie in memory that the transport knows: see
  // net/link/registration_cache.h.
  bool RegistersMemory() { return Started()->RegistersMemory(); }

  // Whether the job failed; once true, only Stop may be called.
  bool failed();

  // Throws Error when the job failed: who waits for streams alone hears of it by this.
  void Check() { Started()->Check(); }

  // Whether streams wait for this sum.  Throws UsageError if there is no such handle.
  bool IsStreamed(int64_t handle) { return Started()->IsStreamed(handle); }

  // Makes tensors known to the servers, by one message to each, and finds room for those on
  // GPUs in pinned memory.  Blocks until the servers have answered.
  void Declare(const std::vector<TensorSpec>& specs) { Started()->Declare(specs); }

  // See Declarations::Release.  Does nothing when not started.  Never blocks.
  void Release(const std::vector<std::string>& names, uint32_t lowest_rank) {
    if (const auto engine = this->engine()) engine->Release(names, lowest_rank);
  }

  // Starts a sum and returns its handle, a positive number.  Blocks only for the
  // first use of a name that was not declared.
  // `known`, in and out: the tensor as the call before knew it, null at first.  With it a tensor is
  // looked up once in a job.
  int64_t PushPull(const PushPullRequest& request, TensorPtr* known = nullptr) {
    return Started()->PushPull(request, known);
  }

  // Whether WaitFor would return true (or throw) at once; of a streamed sum, whether it has come.
  bool Poll(int64_t handle);

  // Blocks until the sum is there (true) or the time is up (false).  When it is there, forgets
  // the handle, and makes `stream` wait until the sum is on the GPU.  Throws Error if the sum
  // failed, once nothing writes into its output any more; UsageError if there is no such handle.
  // The input of a sum that failed may still be read, until Stop has returned.
  bool WaitFor(int64_t handle, DeviceStream stream, std::chrono::nanoseconds limit);
  // Whether it ended, well or not, within this time; the handle stays.
  bool AwaitEnd(int64_t handle, std::chrono::nanoseconds limit);

  // Of a sum that streams wait for: enqueues in `stream` waiting for it and copying it to its
  // tensor, and forgets the handle.  Throws as WaitFor does, for what is known to have failed.
  Landing Land(int64_t handle, DeviceStream stream);

  // Calls `then` once Poll returns true, at once if it does already: on a thread of the engine's,
  // and not to block.  Throws UsageError if there is no such handle.
  void CallAtEnd(int64_t handle, std::function<void()> then);

  std::pair<uint64_t, double> Speed() { return speed_.Get(); }

  double LinkGbps() { return Started()->link_gbps(); }

  // Bytes of the partitions into which a tensor of `bytes` bytes is cut.
  uint32_t PartitionBytes(DType dtype, uint64_t bytes, uint64_t piece_of, bool updated = false) {
    return Started()->plan().PartitionBytes(dtype, bytes, piece_of, updated);
  }

  // Bytes of each server of this tensor.
  std::vector<uint64_t> BytesPerServer(const TensorSpec& spec) {
    return Started()->plan().BytesPerServer(spec);
  }

  // Replicas: see Engine.
  ps::ReplicaView Replicas() { return Started()->Replicas(); }
  std::vector<std::string> Awaited() { return Started()->Awaited(); }
  bool IsLate() { return Started()->is_late(); }
  void SayReady() { Started()->SayReady(); }
  void AskToAdmit(int replica, int life) { Started()->AskToAdmit(replica, life); }
  std::vector<int> TakeMissing() { return Started()->TakeMissing(); }
  ProgressByTensor Rounds() { return Started()->Rounds(); }
  void SetRounds(const ProgressByTensor& progress) { Started()->SetRounds(progress); }

  // What was counted since the process began, and what the queues hold now.
  std::vector<Metric> Metrics();

 private:
  // That of the job, or null.  It lives for as long as a caller is inside.
  std::shared_ptr<Engine> engine();
  // Throws Error when there is none.
  std::shared_ptr<Engine> Started();

  SpeedMeter speed_;
  WorkerCounters counters_;
  std::unique_ptr<MetricsServer> metrics_server_;
  ps::Mutex mu_;
  std::shared_ptr<Engine> engine_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_ENGINE_ENGINE_H_
