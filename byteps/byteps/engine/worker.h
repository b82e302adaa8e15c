// The worker: cuts tensors into partitions, pushes them, takes the sums.
//
//   PushPull ─▶ push queue (by priority) ─▶ push loops ─▶ server
//                 [copy from the GPU]                        │
//   Wait ◀── last partition ◀── pull loops ◀─────────────────┘
//                 [copy to the GPU]
//
// A tensor on the CPU is sent from where it lies; a tensor on a GPU goes through
// pinned memory.  Every thread blocks while it has nothing to do.
#ifndef BYTEPS_ENGINE_WORKER_H_
#define BYTEPS_ENGINE_WORKER_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "byteps/base/blocking_queue.h"
#include "byteps/base/config.h"
#include "byteps/base/protocol.h"
#include "byteps/cluster/channel.h"
#include "byteps/device/device.h"
#include "byteps/engine/placement.h"
#include "byteps/engine/speed.h"
#include "byteps/observe/metrics.h"
#include "byteps/observe/metrics_server.h"
#include "byteps/observe/trace.h"
#include "ps/internal/message.h"
#include "ps/membership.h"

namespace byteps {
namespace core {

// One sum to be made.  The memory belongs to the caller, who keeps it alive and
// leaves it alone until Wait has returned; after a failed Wait the transport may
// still read `input` until Stop.
struct PushPullRequest {
  std::string name;
  DType dtype = DType::kFloat32;
  const void* input = nullptr;
  void* output = nullptr;  // may be `input`
  uint64_t bytes = 0;
  // The part of the sum that is wanted, in bytes; the rest of `output` stays as it
  // is.  Equal ends: nothing is.
  uint64_t pull_begin = 0;
  uint64_t pull_end = UINT64_MAX;  // to the end of the tensor
  bool average = true;
  int priority = 0;             // higher goes first
  std::vector<uint32_t> group;  // ranks that sum, ascending; empty: all workers
  uint64_t placement = 0;
  bool has_placement = false;  // false: from the key
  int device = kCpu;           // where input and output are
  void* stream = nullptr;      // cudaStream_t after whose work input is ready
};

// All public functions may be called by any thread; Start and Stop by one at a
// time.  Errors are thrown as Error (the job failed) or UsageError (bad call).
class Worker : public ChannelUser {
 public:
  Worker() = default;
  ~Worker() override;

  // Joins the cluster by `channel`; blocks until every node has.
  void Start(const Config& config, const Launch& launch, int num_servers,
             std::unique_ptr<Channel> channel);

  // Waits for what is under way (no longer than BYTEPS_PEER_TIMEOUT_S), says
  // goodbye, and closes.  Does nothing when not started.
  void Stop(bool suspend);

  bool started() const { return started_; }

  // Whether what is pushed should lie in memory that the transport knows: see
  // ps/lasting_memory.h.  Of a worker that was started.
  bool RegistersMemory() const { return channel_->RegistersMemory(); }

  // Whether the job failed; the worker is of no use then but to be stopped.
  bool failed();

  // Starts a sum and returns its handle, a positive number.  Blocks only for the
  // first use of a name, while the servers take the declaration.
  int64_t PushPull(const PushPullRequest& request);

  // Whether Wait would return (or throw) at once.
  bool Poll(int64_t handle);

  // Blocks until the sum is there, and forgets the handle.  Throws Error if it
  // failed, UsageError if there is no such handle.
  void Wait(int64_t handle);

  std::pair<uint64_t, double> Speed() { return speed_.Get(); }

  // Bytes of the partitions into which a tensor of `bytes` bytes is cut.
  uint32_t PartitionBytes(uint64_t bytes) const;

  // Bytes of each server of the tensor that `request` describes; its values are not used.
  std::vector<uint64_t> BytesPerServer(const PushPullRequest& request) const;

  // What was counted since the process began, and what the queues hold now.
  std::vector<Metric> Metrics();

 private:
  using Clock = std::chrono::steady_clock;

  struct Tensor {
    Declaration declaration;
    uint64_t key = 0;
    uint32_t rounds = 0;
    std::unique_ptr<StagingBuffer> staging;  // of a tensor on a GPU
    std::mutex mu;                           // one caller declares, others wait
    bool declared = false;
  };

  // When a partition that is traced came to the end of a stage, in SteadyNs; 0: it has
  // not.  Who holds the partition writes it, but for the transport, which tells of `sent`
  // when it likes.
  struct Times {
    int64_t queued = 0;
    int64_t taken = 0;
    int64_t copied = 0;
    std::atomic<int64_t> sent{0};
    int64_t answered = 0;
    int64_t pulling = 0;
  };

  struct Operation {
    int64_t handle = 0;
    Tensor* tensor = nullptr;
    PushPullRequest request;
    std::unique_ptr<ReadyEvent> ready;
    std::unique_ptr<StagingBuffer> own_staging;  // when the tensor's is in use
    char* staging = nullptr;
    uint32_t round = 0;
    Clock::time_point started;
    std::atomic<uint64_t> partitions_left{0};
    std::vector<Times> times;  // by partition; empty when it is not traced
    // Guarded by mu_:
    bool done = false;
    std::string error;
  };
  using OperationPtr = std::shared_ptr<Operation>;

  // One partition of an operation.
  struct Task {
    OperationPtr operation;
    uint64_t index = 0;
  };

  // Bytes of a partition, from its start.
  struct Part {
    uint64_t offset;
    uint64_t bytes;
  };
  static Part WantedPart(const Task& task);

  // Null when the task's operation is not traced.
  static Times* TimesOf(const Task& task) {
    auto& times = task.operation->times;
    return times.empty() ? nullptr : &times[task.index];
  }

  // A request sent and not answered.
  struct Pending {
    Task task;  // without operation: a declaration
    int server = 0;
    int64_t sent = 0;  // SteadyNs
  };

  struct Received {
    Task task;
    ps::SArray<char> values;
  };

  // The order in which partitions leave: by priority, then first come.
  struct PushOrder {
    int priority;
    uint64_t sequence;
    bool operator<(const PushOrder& o) const {
      return priority != o.priority ? priority > o.priority : sequence < o.sequence;
    }
  };

  Tensor* Declare(const PushPullRequest& request);
  void SendDeclaration(Tensor* tensor);
  Declaration MakeDeclaration(const PushPullRequest& request) const;
  void ThrowIfFailed();

  void PushLoop(int track);
  void PullLoop(int track);
  void WatchLoop();
  void PushPartition(DeviceCopier* copier, const Task& task);
  void PullPartition(DeviceCopier* copier, Received* received);
  void FinishPartition(const OperationPtr& operation);
  void FailOperation(const OperationPtr& operation, const std::string& error);

  void OnMessage(ps::Message* msg) override;
  void OnEvent(const ps::MembershipEvent& event) override;
  void Fail(const std::string& reason);
  // A request about the partition of `pending`, which is remembered until the answer.
  ps::Message MakePartitionRequest(int op, Pending pending);
  uint64_t Remember(Pending pending);
  void ReturnCredit();

  // worker_trace.cc; nothing happens to a task that is not traced.
  int AddTrack(const char* name, long number);
  void StartTrace(Operation* operation, uint64_t partitions);
  TracedPartition Traced(const Task& task) const;
  // `done` is when its sum was there; 0: it failed.
  void TraceRow(const Task& task, int64_t done);
  void TraceUnfinished();  // mu_ is held

  std::unique_ptr<Channel> channel_;
  Launch launch_;
  int num_servers_ = 0;
  uint32_t smallest_partition_ = 0;
  uint32_t largest_partition_ = 0;
  KeyHash hash_ = KeyHash::kRaw;
  double op_timeout_s_ = 0;
  double peer_timeout_s_ = 0;
  uint64_t credit_limit_ = 0;
  bool fused_ = true;
  std::atomic<bool> started_{false};
  SpeedMeter speed_;
  WorkerCounters counters_;
  std::unique_ptr<MetricsServer> metrics_server_;
  std::unique_ptr<Tracer> tracer_;  // null: nothing is traced

  std::mutex mu_;
  std::condition_variable done_cond_;   // an operation or declaration ended
  std::condition_variable push_cond_;   // something to push, or credit for it
  std::condition_variable watch_cond_;  // an operation began, or stop
  // Guarded by mu_:
  bool failed_ = false;
  bool stopping_ = false;
  std::string failure_;
  std::map<std::string, std::unique_ptr<Tensor>> tensors_;  // by name and lowest rank
  std::unordered_map<int64_t, OperationPtr> operations_;    // by handle, until waited for
  std::set<OperationPtr> running_;
  std::map<PushOrder, Task> push_queue_;
  uint64_t in_transport_ = 0;  // partitions handed over and not sent yet
  std::unordered_map<uint64_t, Pending> pending_;
  std::unordered_map<uint64_t, std::string> declaration_replies_;
  int64_t last_handle_ = 0;
  uint64_t last_request_ = 0;
  uint64_t sequence_ = 0;

  std::unique_ptr<BlockingQueue<Received>> pull_queue_;
  std::vector<std::thread> threads_;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_WORKER_H_
