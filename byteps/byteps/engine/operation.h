// Operation: a sum that a worker has begun, with its partitions, its end and its failure.
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

// One sum in flight, and its partitions.
class StagedSum;

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

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_ENGINE_OPERATION_H_
