#include "byteps/engine/operation.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "byteps/base/block_codec.h"
#include "byteps/base/invariant.h"
#include "byteps/engine/push_pull_request.h"
#include "byteps/engine/speed_meter.h"
#include "byteps/engine/staged_sum.h"

namespace byteps {
namespace core {

namespace {

// Limit of polling for the last copy to the GPU, which takes less.
constexpr std::chrono::microseconds kAwake(100);

// A sum of at most this many bytes takes about 200 us if all members are ready. Waking two threads,
// the receiver and the waiter, would add a fifth. So the thread that waits for the sum also
// receives it, and sleeps only after kAwakeForSmall. Staged sums of a GPU do the same up to 1 MiB,
// although they take longer.
constexpr uint64_t kSmallSum = 64 << 10;
constexpr std::chrono::microseconds kAwakeForSmall(400);

// Transfer time on a link of 8 Gbit/s.
std::chrono::microseconds TimeFor(uint64_t bytes) {
  return std::chrono::microseconds(bytes / 1000);
}

// A range of a tensor's values, before they are coded in blocks.
struct CodedRange {
  uint64_t begin;
  uint64_t count;
};

// Returns the range of values that a part of the blocks holds. The last block may be partly filled.
CodedRange RangeOf(const Operation::Part& part, DType blocks, uint64_t values) {
  const uint64_t begin = part.offset / SizeOf(blocks) * kBlockValues;
  const uint64_t end = begin + part.bytes / SizeOf(blocks) * kBlockValues;
  return {begin, std::min(end, values) - std::min(begin, values)};
}

}  // namespace

Operation::Operation(PushPullRequest what, TensorPtr which)
    : request(std::move(what)),
      tensor(std::move(which)),
      partitions_left_(tensor ? tensor->declaration.NumPartitions() : 0),
      arrivals_left_(partitions_left_.load()) {
  const uint64_t partitions = partitions_left_;
  if (partitions > 1) more_stages_.reset(new std::atomic<Stage>[partitions]());
}

Operation::Part Operation::Whole(uint64_t index) const {
  const Declaration& d = tensor->declaration;
  return {index * d.partition_bytes, d.PartitionSize(index)};
}

Operation::Part Operation::State(uint64_t index) const {
  const Part whole = Whole(index);
  const DType dtype = request.tensor.dtype;
  return {StateBytes(whole.offset, dtype), StateBytes(whole.bytes, dtype)};
}

Operation::Part Operation::Offered(uint64_t index) const {
  if (request.op == kReadState) return State(index);
  const Part whole = Whole(index);
  if (!tensor->declaration.rule) return whole;
  const DType dtype = request.tensor.dtype;
  return {AnswerBytes(dtype, whole.offset), AnswerBytes(dtype, whole.bytes)};
}

Operation::Part Operation::Sent(uint64_t index) const {
  if (request.op == kLoadState) return State(index);
  if (request.op == kReadState || request.op == kStep) return {0, 0};
  return Whole(index);
}

Operation::Part Operation::Wanted(uint64_t index) const {
  if (request.op == kLoadState) return {0, 0};
  if (request.op == kPushNorm) return {index * sizeof(GradientSums), sizeof(GradientSums)};
  const Part all = Offered(index);
  const uint64_t end = all.offset + all.bytes;
  const uint64_t from = std::min(std::max(request.pull_begin, all.offset), end);
  const uint64_t to = std::max(std::min(request.pull_end, end), from);
  return {from, to - from};
}

const char* Operation::Source(uint64_t index) const {
  if (staged) return staged->MemoryOf(index);
  return static_cast<const char*>(request.input) + Sent(index).offset;
}

char* Operation::Target(uint64_t index) const {
  if (staged) return staged->MemoryOf(index) + Wanted(index).offset - Whole(index).offset;
  return static_cast<char*>(request.output) + Wanted(index).offset;
}

void Operation::Encode(uint64_t index) const {
  const CodedValues& coded = request.coded;
  const Part part = Sent(index);
  const CodedRange range = RangeOf(part, request.tensor.dtype, coded.count);
  const char* const from =
      static_cast<const char*>(coded.input) + range.begin * SizeOf(coded.dtype);
  char* const to = static_cast<char*>(request.output) + part.offset;
  const Chance chance = {ChanceSeed(name(), round, tensor->layout.rank),
                         part.offset / SizeOf(request.tensor.dtype)};
  EncodeBlocks(request.tensor.dtype, to, coded.dtype, from, range.count,
               coded.lost == nullptr ? nullptr : coded.lost + range.begin,
               tensor->declaration.stochastic ? &chance : nullptr);
}

void Operation::Decode(uint64_t index, const char* blocks) const {
  const CodedValues& coded = request.coded;
  const DType type = request.tensor.dtype;
  const size_t size = SizeOf(coded.dtype);
  const CodedRange range = RangeOf(Wanted(index), type, coded.count);
  if (range.count == 0) return;
  uint64_t begin = range.begin;
  const uint64_t end = std::min(range.begin + range.count, coded.end);
  char* const output = static_cast<char*>(coded.output);
  if (begin < coded.begin) {  // the first block also holds unwanted values
    alignas(float) char values[kBlockValues * sizeof(float)];
    const uint64_t next = std::min(begin + kBlockValues, end);
    DecodeBlocks(type, blocks, coded.dtype, values, next - begin);
    memcpy(output + coded.begin * size, values + (coded.begin - begin) * size,
           (next - coded.begin) * size);
    begin = next;
    blocks += SizeOf(type);
  }
  if (begin < end) DecodeBlocks(type, blocks, coded.dtype, output + begin * size, end - begin);
}

Operation::Part Operation::WantedOutput() const {
  if (request.op == kLoadState) return {0, 0};
  if (request.op == kPushNorm)
    return {0, tensor->declaration.NumPartitions() * sizeof(GradientSums)};
  const uint64_t end = std::min(request.pull_end, request.OfferedBytes());
  return {request.pull_begin, end - std::min(end, request.pull_begin)};
}

bool Operation::is_done() { return done_; }

std::string Operation::error() {
  ps::MutexLock lock(&mu_);
  return error_;
}

void Operation::End(const std::string& error, DeviceMoment moment) {
  std::function<void()> then;
  {
    ps::MutexLock lock(&mu_);
    BPS_INVARIANT_NOTED("an operation ends once", !done_, "'" + name() + "' ended again: " + error);
    done_ = true;
    error_ = error;
    landed_ = std::move(moment);
    then.swap(then_);
  }
  cond_.NotifyAll();
  if (then) then();
}

void Operation::CallAtEnd(std::function<void()> then) {
  {
    ps::MutexLock lock(&mu_);
    if (!done_) {
      then_ = std::move(then);
      return;
    }
  }
  then();
}

void Operation::Move(uint64_t index, Stage to) {
  const Stage from = StageOf(index)->exchange(to, std::memory_order_acq_rel);
  // A partition may skip stages: a CPU tensor is not copied; a pull without push sends nothing.
  BPS_INVARIANT("a partition is in one stage", from < to,
                "partition " + std::to_string(index) + " of '" + name() + "' went from stage " +
                    std::to_string(static_cast<int>(from)) + " to " +
                    std::to_string(static_cast<int>(to)));
}

bool Operation::CountPartition(uint64_t index) {
  Move(index, Stage::kThrough);
  const uint64_t left = partitions_left_.fetch_sub(1);
  BPS_INVARIANT("a sum has as many parts as were counted", left > 0,
                "'" + name() + "' had no partition left");
  return left == 1;
}

void Operation::CountArrival() {
  const uint64_t left = arrivals_left_.fetch_sub(1);
  BPS_INVARIANT("a sum has as many parts as were counted", left > 0,
                "'" + name() + "' had no partition to arrive");
  if (left != 1) return;
  {
    // A waiter that has just checked the count under the lock is asleep once this thread gets the
    // lock, so the notification reaches it.
    ps::MutexLock lock(&mu_);
  }
  cond_.NotifyAll();
}

bool Operation::AwaitEnd(std::chrono::nanoseconds limit, const std::function<void()>& receive) {
  const auto now = Clock::now();
  const auto deadline = now + limit;
  if (request.tensor.bytes <= kSmallSum || is_copied_by_caller()) {
    StayAwake(std::min(deadline, now + kAwakeForSmall + TimeFor(request.tensor.bytes)), receive);
  }
  ps::MutexLock lock(&mu_);
  // The wait is ended by the end of the sum, at the latest by the watcher; deadline: the caller's.
  if (!cond_.WaitUntil(&mu_, deadline, [this] { return done_ || arrivals_left_ == 0; })) {
    return false;
  }
  lock.Unlock();
  // All answers of this sum are here. This thread receives no messages for other sums, because that
  // would delay this sum.
  StayAwake(std::min(deadline, Clock::now() + kAwake), [] {});
  lock.Lock();
  // The wait is ended by the copies to the GPU, or a failure; deadline: the caller's.
  return cond_.WaitUntil(&mu_, deadline, [this] { return done_.load(); });
}

void Operation::StayAwake(Clock::time_point until, const std::function<void()>& each) const {
  while (!done_ && Clock::now() < until) {
    each();
    std::this_thread::yield();
  }
}

bool Operation::BeginWriting() {
  ps::MutexLock lock(&mu_);
  if (done_) return false;
  ++writers_;
  return true;
}

void Operation::EndWriting() {
  {
    ps::MutexLock lock(&mu_);
    BPS_INVARIANT_NOTED("a writer that stops had begun", writers_ > 0,
                        "nobody wrote into the output of '" + name() + "'");
    // Threads wait for writers only after the operation's end. Before the end, a notification would
    // wake the threads that wait for the end.
    if (--writers_ > 0 || !done_) return;
  }
  written_.NotifyAll();
}

void Operation::AwaitWriters() {
  ps::MutexLock lock(&mu_);
  if (writers_ > 0) PS_PROBE(kAwaitsWriters);
  // The wait is ended by the threads that copy and never block; deadline: none.
  written_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return writers_ == 0; });
}

DeviceMoment Operation::landed() {
  ps::MutexLock lock(&mu_);
  return landed_;
}

}  // namespace core
}  // namespace byteps
