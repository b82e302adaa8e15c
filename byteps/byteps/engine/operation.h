// Operation: a sum that a worker has begun, with the state of its partitions and its outcome.
#ifndef BYTEPS_ENGINE_OPERATION_H_
#define BYTEPS_ENGINE_OPERATION_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "byteps/base/awake_clock.h"
#include "byteps/base/mutex.h"
#include "byteps/device/device.h"
#include "byteps/device/device_copies.h"
#include "byteps/device/pinned_pool.h"
#include "byteps/engine/push_pull_request.h"
#include "byteps/engine/tensor.h"

namespace byteps {
namespace core {

class StagedSum;

// Times (SteadyNs) at which a traced partition has completed its stages; 0: not yet. The thread
// that works on the partition sets them. The transport sets `sent`, at any time.
struct PartitionTimes {
  int64_t queued = 0;
  int64_t ready = 0;  // the GPU had computed the values
  int64_t taken = 0;
  int64_t copied = 0;  // the values were copied from the GPU
  std::atomic<int64_t> sent{0};
  int64_t answered = 0;
  int64_t pulling = 0;
};

class Operation {
 public:
  using Clock = std::chrono::steady_clock;

  // A range of the tensor, in bytes.
  struct Part {
    uint64_t offset;
    uint64_t bytes;
  };

  Operation(PushPullRequest what, TensorPtr which);

  const PushPullRequest request;
  const TensorPtr tensor;  // null: the operation sums nothing
  const Clock::time_point started = Clock::now();
  // Time at which the current wait began, in awake time of this process. The wait begins anew when
  // a server is replaced.
  std::atomic<ps::AwakeClock::time_point> awaited_since{ps::AwakeClock::now()};
  // These four members are set before other threads see this operation.
  int64_t handle = 0;
  uint32_t round = 0;
  DeviceMoment ready;                 // GPU tensors: the moment at which the values are ready
  std::shared_ptr<StagedSum> staged;  // null: the sum is not staged
  std::vector<PartitionTimes> times;  // by partition; empty if not traced

  const std::string& name() const { return request.tensor.name; }
  // Returns whether partitions are copied from a GPU individually. (Staged sums lie in host
  // memory.)
  bool on_gpu() const { return request.tensor.device != kCpu && !staged && !moves_state(); }
  // Returns whether only GPU streams wait for the sum, no host thread.
  bool streams_wait() const { return staged && request.streamed; }
  // Returns whether the calling thread copies the whole tensor itself: the tensor is small, and no
  // other sum was in flight.
  bool is_copied_by_caller() const { return staged && !request.streamed; }
  // Returns whether the output is on the GPU, too.
  bool output_on_gpu() const { return on_gpu() && request.op != kPushNorm; }
  bool moves_state() const { return request.op == kLoadState || request.op == kReadState; }
  // Returns whether the operation starts a new round. A kStep continues the last round.
  bool begins_round() const { return request.op != kStep && !moves_state(); }

  // Ranges of partition `index`, in bytes of the tensor. Whole: all of it. Offered: the range of
  // which a server can be asked for a part. Sent: the part of the input that is sent. Wanted: the
  // part of the output that is wanted.
  Part Whole(uint64_t index) const;
  Part Offered(uint64_t index) const;
  Part Sent(uint64_t index) const;
  Part Wanted(uint64_t index) const;
  // Addresses of partition `index` in the input, and of the partition's wanted sum in the output.
  const char* Source(uint64_t index) const;
  char* Target(uint64_t index) const;
  // Returns the wanted range of `output`.
  Part WantedOutput() const;
  // Returns the range of a partition in its fp32 state.
  Part State(uint64_t index) const;
  // Coded tensors: Encode fills a partition's input from the tensor's values. Decode writes the
  // partition's wanted values from `blocks`, the blocks of the range that Target names.
  bool is_coded() const { return request.coded.count > 0; }
  void Encode(uint64_t index) const;
  void Decode(uint64_t index, const char* blocks) const;

  // ----- thread-safe

  bool is_done();
  // The error, or "". Valid once the operation is done.
  std::string error();
  // Counts a partition whose sum has arrived and is being copied to the GPU. The last arrival wakes
  // the waiting thread, which then spins until the copy is done, because waking it after the copy
  // would take as long as the copy.
  void CountArrival();
  // Moves a partition to a later stage. A partition enters each stage at most once, in this order.
  // Otherwise throws Error.
  enum class Stage : uint8_t { kWaiting, kTaken, kCopying, kPushed, kAnswered, kThrough };
  void Move(uint64_t index, Stage to);
  bool IsThrough(uint64_t index) { return *StageOf(index) == Stage::kThrough; }
  // Restarts a partition that was pushed to a lost server.
  void Restart(uint64_t index) {
    *StageOf(index) = Stage::kWaiting;
    awaited_since = ps::AwakeClock::now();
  }
  // Counts a completed partition. Returns true for the last one; the caller must then end the
  // operation. Throws Error.
  bool CountPartition(uint64_t index);
  // CountCopyBegun and CountCopyDone count copies to the GPU. For one copy, they may be called in
  // either order.
  void CountCopyBegun() { ++copies_; }
  void CountCopyDone() { --copies_; }
  // Returns whether copies to the GPU may be in flight. Valid when all copies have been enqueued.
  bool is_copying() const { return copies_ != 0; }
  // Returns true to the first caller, who must then call End.
  bool ClaimEnd() { return !claimed_.exchange(true); }
  // Ends the operation. `error`: "" if the operation succeeded. `moment`: the moment at which the
  // sums are on the GPU.
  void End(const std::string& error, DeviceMoment moment);
  // Calls `then` when the operation has ended, or at once if it has ended. The thread that ends the
  // operation makes the call, without a lock; `then` must not block. Only one function can be
  // registered.
  void CallAtEnd(std::function<void()> then);
  // Waits until the operation has ended, for at most `limit`. Returns whether it has ended.
  // Meanwhile calls `receive`, which receives pending messages and must not block.
  bool AwaitEnd(std::chrono::nanoseconds limit, const std::function<void()>& receive);

  // BeginWriting and EndWriting enclose every write into `output`. If BeginWriting returns false,
  // do not write: the operation failed, and the caller may have freed the memory.
  bool BeginWriting();
  void EndWriting();
  // Blocks until all writes into `output` have ended. Call after End.
  void AwaitWriters();

  // The moment at which the sums are on the GPU. Valid if the operation has succeeded.
  DeviceMoment landed();

 private:
  std::atomic<Stage>* StageOf(uint64_t index) {
    return more_stages_ ? &more_stages_[index] : &stage_;
  }
  // Calls `each` and yields, repeatedly, until the operation has ended or `until` has come.
  void StayAwake(Clock::time_point until, const std::function<void()>& each) const;

  std::atomic<Stage> stage_{Stage::kWaiting};          // used if there is one partition
  std::unique_ptr<std::atomic<Stage>[]> more_stages_;  // used if there are several, by index
  std::atomic<uint64_t> partitions_left_;
  std::atomic<uint64_t> arrivals_left_;
  std::atomic<int64_t> copies_{0};
  std::atomic<bool> claimed_{false};

  ps::Mutex mu_;
  ps::CondVar cond_;               // the operation ended, or all sums have arrived
  ps::CondVar written_;            // no writer is left after the end
  std::atomic<bool> done_{false};  // set with mu_ held
  std::string error_ PS_GUARDED_BY(mu_);
  std::function<void()> then_ PS_GUARDED_BY(mu_);
  int writers_ PS_GUARDED_BY(mu_) = 0;
  DeviceMoment landed_ PS_GUARDED_BY(mu_);
};
using OperationPtr = std::shared_ptr<Operation>;

// A partition in flight to its server.
struct Task {
  enum Stage {
    kTake,  // the partition has room in the server's window, and nothing else yet
    kCopy,  // the partition also has pinned memory to copy to
    kSend,  // the values can be sent
  };
  OperationPtr operation;
  uint64_t index = 0;
  int server = 0;
  uint64_t bytes = 0;
  bool again = false;  // whether the partition was pushed before, to a server that is lost
  Stage stage = kTake;
  PinnedBlock block;  // pinned memory for the values of a GPU tensor

  // Returns the times to set, or null if the operation is not traced.
  PartitionTimes* times() const {
    return operation->times.empty() ? nullptr : &operation->times[index];
  }
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_ENGINE_OPERATION_H_
