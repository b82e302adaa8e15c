// The sums that a worker has begun: their partitions, handles, ends and failures.
#ifndef BYTEPS_ENGINE_OPERATION_H_
#define BYTEPS_ENGINE_OPERATION_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/base/process.h"
#include "byteps/device/device.h"
#include "byteps/engine/declarations.h"
#include "byteps/observe/metrics.h"

namespace byteps {
namespace core {

// How fast tensors were summed lately.

// Thread-safe.
class SpeedMeter {
 public:
  // `bytes` of tensors were summed just now, which took since `started`.
  void Record(uint64_t bytes, std::chrono::steady_clock::time_point started) {
    const auto now = std::chrono::steady_clock::now();
    ps::MutexLock lock(&mu_);
    samples_.push_back({started, now, bytes});
    Forget(now);
  }

  // (ms since the epoch, MB/s: tensor bytes per second from the start of the oldest
  // operation of the last 10 s until now); 0 MB/s when there was none.
  std::pair<uint64_t, double> Get() {
    const auto now = std::chrono::steady_clock::now();
    ps::MutexLock lock(&mu_);
    Forget(now);
    uint64_t bytes = 0;
    auto first = now;
    for (const auto& sample : samples_) {
      bytes += sample.bytes;
      if (sample.started < first) first = sample.started;
    }
    const double seconds = std::chrono::duration<double>(now - first).count();
    const auto epoch = std::chrono::system_clock::now().time_since_epoch();
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(epoch).count();
    return {static_cast<uint64_t>(ms), seconds > 0 ? bytes / 1e6 / seconds : 0.0};
  }

 private:
  struct Sample {
    std::chrono::steady_clock::time_point started;
    std::chrono::steady_clock::time_point finished;
    uint64_t bytes;
  };

  void Forget(std::chrono::steady_clock::time_point now) PS_REQUIRES(mu_) {
    while (!samples_.empty() && now - samples_.front().finished > std::chrono::seconds(10)) {
      samples_.pop_front();
    }
  }

  ps::Mutex mu_;
  std::deque<Sample> samples_ PS_GUARDED_BY(mu_);
};

// One sum in flight, and its partitions.
class StagedSum;

// The caller's values of a tensor on the CPU that travels in blocks of few bits
// (base/block_codec.h).  They are encoded partition by partition as they are pushed, and decoded as
// their sums come.
struct CodedValues {
  DType dtype = DType::kFloat32;
  uint64_t count = 0;  // 0: there are none, and the tensor travels as it is
  uint64_t begin = 0;  // of the values that are wanted; the others stay as they are
  uint64_t end = 0;
  const void* input = nullptr;
  void* output = nullptr;    // may be `input`
  uint16_t* lost = nullptr;  // by rounding, for each value, with feedback
};

// One sum to be made.  The memory belongs to the caller, who keeps it alive and leaves it alone
// until Wait has returned.  After a failed Wait nothing is written into `output` any more, but
// the transport may still read `input` until Stop.
struct PushPullRequest {
  TensorSpec tensor;  // input and output are on tensor.device
  const void* input = nullptr;
  void* output = nullptr;  // may be `input`
  CodedValues coded;       // whose blocks are in `input`, which is `output` then
  // The part of the sum, or of the state, that is wanted, in bytes; the rest of `output`
  // stays as it is.  Equal ends: nothing is.
  uint64_t pull_begin = 0;
  uint64_t pull_end = UINT64_MAX;  // to the end of the tensor
  int priority = 0;                // higher goes first
  bool forgets_lost = false;       // servers, of what rounding lost of the sums before
  DeviceStream stream = nullptr;   // of the GPU: after whose work so far input is ready
  // Of a sum on a GPU: WaitFor returns at once, and its stream waits (engine/staged_sum.h).  Not
  // if there is too little pinned memory: then WaitFor waits for the sum, as always.
  bool streamed = false;
  // What is asked of the servers: kPushPull for a sum; of a tensor with a rule kPushStep,
  // kPushNorm (output: GradientSums of each partition), kPushTry, kStep (of the round of the last
  // kPushNorm or kPushTry; no input), kLoadState (no output) or kReadState (no input).  State is
  // fp32 and on the CPU.
  int op = kPushPull;
  GradientSums* sums = nullptr;  // of kPushTry: for each partition, on the CPU
  std::string detail;            // what follows the header: an UpdateStep, or a slot

  // All of what pull_begin and pull_end name a part of.
  uint64_t OfferedBytes() const;
};

// When a partition that is traced came to the end of a stage, in SteadyNs; 0: it has
// not.  Who holds the partition writes it, but for the transport, which tells of `sent`
// when it likes.
struct PartitionTimes {
  int64_t queued = 0;
  int64_t ready = 0;  // on the GPU
  int64_t taken = 0;
  int64_t copied = 0;  // from the GPU
  std::atomic<int64_t> sent{0};
  int64_t answered = 0;
  int64_t pulling = 0;
};

class Operation {
 public:
  using Clock = std::chrono::steady_clock;

  // Bytes of the tensor, from its start.
  struct Part {
    uint64_t offset;
    uint64_t bytes;
  };

  Operation(PushPullRequest what, TensorPtr which);

  const PushPullRequest request;
  const TensorPtr tensor;  // null: nothing is summed
  const Clock::time_point started = Clock::now();
  // Of the time that this process waits for it; anew, once another server has it.
  std::atomic<ps::AwakeClock::time_point> awaited_since{ps::AwakeClock::now()};
  int64_t handle = 0;                 // set once, before anybody else knows of this
  uint32_t round = 0;                 // likewise
  DeviceMoment ready;                 // likewise; when its values are there, on a GPU
  std::shared_ptr<StagedSum> staged;  // likewise; null: it is not
  std::vector<PartitionTimes> times;  // by partition; empty when it is not traced

  const std::string& name() const { return request.tensor.name; }
  // Whether partitions are copied from a GPU one by one; those of a staged sum lie in host memory.
  bool on_gpu() const { return request.tensor.device != kCpu && !staged && !moves_state(); }
  // Whether streams wait for its sums, and no thread.
  bool streams_wait() const { return staged && request.streamed; }
  // Whether its caller copies all of it: it is small, and was alone.
  bool is_copied_by_caller() const { return staged && !request.streamed; }
  // Whether the output is on the GPU as well.
  bool output_on_gpu() const { return on_gpu() && request.op != kPushNorm; }
  bool moves_state() const { return request.op == kLoadState || request.op == kReadState; }
  // Whether it takes a turn of its own; kStep goes on with the one before.
  bool begins_round() const { return request.op != kStep && !moves_state(); }

  // Of partition `index`: all of it; what a server may be asked for a part of; what of the input
  // is sent; what of the output is wanted.
  Part Whole(uint64_t index) const;
  Part Offered(uint64_t index) const;
  Part Sent(uint64_t index) const;
  Part Wanted(uint64_t index) const;
  // Where partition `index` of the input lies, and where its wanted sum belongs.
  const char* Source(uint64_t index) const;
  char* Target(uint64_t index) const;
  // All that is wanted, in `output`.
  Part WantedOutput() const;
  // The fp32 state of a partition.
  Part State(uint64_t index) const;
  // Of a tensor with coded values: whether it is one; the input of a partition from its values; the
  // wanted values of a partition from `blocks`, which are what Target is for.
  bool is_coded() const { return request.coded.count > 0; }
  void Encode(uint64_t index) const;
  void Decode(uint64_t index, const char* blocks) const;

  // ----- any thread

  bool is_done();
  // Whether it failed, and why; of one that is done.
  std::string error();
  // The sum of a partition has come, and is being copied to the GPU.  The last one wakes the
  // thread that waits for the end, which stays awake during the copy: waking takes as long.
  void CountArrival();
  // A partition goes on to another stage: each of them once, in this order.  Throws Error.
  enum class Stage : uint8_t { kWaiting, kTaken, kCopying, kPushed, kAnswered, kThrough };
  void Move(uint64_t index, Stage to);
  bool IsThrough(uint64_t index) { return *StageOf(index) == Stage::kThrough; }
  // One that was pushed to a server that is lost begins anew.
  void Restart(uint64_t index) {
    *StageOf(index) = Stage::kWaiting;
    awaited_since = ps::AwakeClock::now();
  }
  // One of its partitions is through.  True for the last one: the operation has to be ended.
  // Throws Error.
  bool CountPartition(uint64_t index);
  // Each copy to the GPU is counted when it is enqueued and when it is done, in either order.
  void CountCopyBegun() { ++copies_; }
  void CountCopyDone() { --copies_; }
  // Whether a copy is still in flight, or may be.  To be asked once all were enqueued.
  bool is_copying() const { return copies_ != 0; }
  // True for the first who asks, who then has to end it.
  bool ClaimEnd() { return !claimed_.exchange(true); }
  // Ends it, well when `error` is empty.  `moment`: when its sums are on the GPU.
  void End(const std::string& error, DeviceMoment moment);
  // Calls `then` when it has ended, at once if it has: on the thread that ended it, without a lock,
  // and not to block.  At most one function is kept.
  void CallAtEnd(std::function<void()> then);
  // Whether it ended within this time.  `receive`: receives what is there, and does not block.
  bool AwaitEnd(std::chrono::nanoseconds limit, const std::function<void()>& receive);

  // Around whatever writes into `output`.  Not to be begun when it returns false: the operation
  // failed, and the memory may be another's.
  bool BeginWriting();
  void EndWriting();
  // Blocks until all who began have ended; after End.
  void AwaitWriters();

  // When its sums are on the GPU: of one that ended well.
  DeviceMoment landed();

 private:
  std::atomic<Stage>* StageOf(uint64_t index) {
    return more_stages_ ? &more_stages_[index] : &stage_;
  }
  // Calls `each` and yields until it has ended, or until then.
  void StayAwake(Clock::time_point until, const std::function<void()>& each) const;

  std::atomic<Stage> stage_{Stage::kWaiting};          // of the only partition
  std::unique_ptr<std::atomic<Stage>[]> more_stages_;  // of many, by index
  std::atomic<uint64_t> partitions_left_;
  std::atomic<uint64_t> arrivals_left_;
  std::atomic<int64_t> copies_{0};
  std::atomic<bool> claimed_{false};

  ps::Mutex mu_;
  ps::CondVar cond_;               // it ended, or all sums have come
  ps::CondVar written_;            // after that, nobody writes any more
  std::atomic<bool> done_{false};  // set with mu_ held
  std::string error_ PS_GUARDED_BY(mu_);
  std::function<void()> then_ PS_GUARDED_BY(mu_);
  int writers_ PS_GUARDED_BY(mu_) = 0;
  DeviceMoment landed_ PS_GUARDED_BY(mu_);
};
using OperationPtr = std::shared_ptr<Operation>;

// One partition of an operation, in flight to its server.
struct Task {
  enum Stage {
    kTake,  // it has its place in the server's window, and nothing else yet
    kCopy,  // it has pinned memory, to be copied to
    kSend,  // its values can be sent
  };
  OperationPtr operation;
  uint64_t index = 0;
  int server = 0;
  uint64_t bytes = 0;
  bool again = false;  // it was pushed before, to a server that is lost
  Stage stage = kTake;
  PinnedBlock block;  // of a tensor on a GPU

  // Null when it is not traced.
  PartitionTimes* times() const {
    return operation->times.empty() ? nullptr : &operation->times[index];
  }
};

// Any thread may call anything.
class Operations {
 public:
  // Both outlive this.
  Operations(WorkerCounters* counters, SpeedMeter* speed);

  // `give_back` is called with each tensor that was released, when its last operation has ended.
  // To be called before the first one begins.
  void SetGiveBack(std::function<void(const TensorPtr&)> give_back) {
    give_back_ = std::move(give_back);
  }

  // Gives it a handle, a positive number that this process has not used before, and a round.
  // Throws Error when the job failed, UsageError when its tensor was released.
  int64_t Begin(const OperationPtr& operation);

  // Throws UsageError when there is no such handle.
  OperationPtr Find(int64_t handle);
  // Likewise.  The handle stands for nothing from now on.
  void Forget(int64_t handle);

  // Ends an operation; nothing happens when it has ended already.
  void Finish(const OperationPtr& operation, DeviceMoment landed);
  void Fail(const OperationPtr& operation, const std::string& error);

  // The job failed: every operation does, now and later.  False when it had failed before.
  bool FailAll(const std::string& reason);
  bool failed();
  std::string failure();
  // Of the first operation that failed, at any peer; empty: none did.
  std::string first_error();
  // Something failed before there was an operation, such as a declaration.
  void NoteError(const std::string& error);

  // Those that have not ended.
  std::vector<OperationPtr> Running();
  size_t num_running();
  // Blocks until none is running, or the job failed, or the time is up.
  void AwaitIdle(double limit_s);
  // Blocks until some are running, or one that streams wait for has failed (true), or the job has
  // (false).
  bool AwaitWork();
  // Blocks for that long, or until one that streams wait for fails; false at once when the job
  // fails.
  bool Sleep(double seconds);

 private:
  // In the order in which they began, whatever their addresses: so they fail in that order, too.
  struct BeganBefore {
    bool operator()(const OperationPtr& a, const OperationPtr& b) const {
      return a->handle < b->handle;
    }
  };
  using RunningSet = std::set<OperationPtr, BeganBefore>;

  void Remove(const OperationPtr& operation);
  // Tells its tensor which of its rounds have not ended.
  static void EndRound(const Operation& operation);

  WorkerCounters* const counters_;
  SpeedMeter* const speed_;
  std::function<void(const TensorPtr&)> give_back_ = [](const TensorPtr&) {};

  ps::Mutex mu_;
  // One for each that waits: who sleeps is not woken with every sum.
  ps::CondVar began_;       // the first of those that run, or the job failed
  ps::CondVar ended_;       // the last one, or the job failed
  ps::CondVar failed_job_;  // the job failed, or an operation that streams wait for
  bool failed_ PS_GUARDED_BY(mu_) = false;
  bool failed_stream_ PS_GUARDED_BY(mu_) = false;  // since Sleep has returned
  std::string failure_ PS_GUARDED_BY(mu_);
  std::string first_error_ PS_GUARDED_BY(mu_);
  std::unordered_map<int64_t, OperationPtr> by_handle_ PS_GUARDED_BY(mu_);  // until waited for
  RunningSet running_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_ENGINE_OPERATION_H_
