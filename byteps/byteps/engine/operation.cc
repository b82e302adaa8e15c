#include "byteps/engine/operation.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "byteps/base/block_codec.h"
#include "byteps/base/invariant.h"
#include "byteps/engine/staged_sum.h"

namespace byteps {
namespace core {

namespace {

// Longer than the last copy to the GPU takes.
constexpr std::chrono::microseconds kAwake(100);

// The answers of a sum of at most so many bytes take some 200 us where the other members are ready.
// To wake the thread that receives, and then the one that waits, would add a fifth to that.  So who
// waits for it receives, and sleeps only after that time.  The same goes for a GPU's sum that is
// staged, of at most 1 MiB, which takes longer.
constexpr uint64_t kSmallSum = 64 << 10;
constexpr std::chrono::microseconds kAwakeForSmall(400);

// On a link of 8 Gbit/s.
std::chrono::microseconds TimeFor(uint64_t bytes) {
  return std::chrono::microseconds(bytes / 1000);
}

// Of as many values, in fp32.
uint64_t StateBytes(uint64_t bytes, DType dtype) { return ValuesIn(dtype, bytes) * sizeof(float); }

struct CodedRange {
  uint64_t begin;
  uint64_t count;
};

// The values of a part of the blocks; the last block may have fewer than it could.
CodedRange RangeOf(const Operation::Part& part, DType blocks, uint64_t values) {
  const uint64_t begin = part.offset / SizeOf(blocks) * kBlockValues;
  const uint64_t end = begin + part.bytes / SizeOf(blocks) * kBlockValues;
  return {begin, std::min(end, values) - std::min(begin, values)};
}

}  // namespace

uint64_t PushPullRequest::OfferedBytes() const {
  if (op == kReadState) return StateBytes(tensor.bytes, tensor.dtype);
  return tensor.rule ? AnswerBytes(tensor.dtype, tensor.bytes) : tensor.bytes;
}

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
  if (begin < coded.begin) {  // the first block has values that are not wanted
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
  // A GPU's values are copied first, and a pull of its own comes behind a push.
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
    // Who has looked in vain has the lock until it sleeps.
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
  // Ended by the sum's end, which the watching thread brings about; deadline: the caller's.
  if (!cond_.WaitUntil(&mu_, deadline, [this] { return done_ || arrivals_left_ == 0; })) {
    return false;
  }
  lock.Unlock();
  // Its answers are here: to receive those of others would only delay it.
  StayAwake(std::min(deadline, Clock::now() + kAwake), [] {});
  lock.Lock();
  // Ended by the copies to the GPU, or a failure; deadline: the caller's.
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
    // Before it ends nobody waits for that, and who waits for the end is not to be woken.
    if (--writers_ > 0 || !done_) return;
  }
  written_.NotifyAll();
}

void Operation::AwaitWriters() {
  ps::MutexLock lock(&mu_);
  if (writers_ > 0) PS_PROBE(kAwaitsWriters);
  // Ended by threads that copy and never wait; deadline: none.
  written_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return writers_ == 0; });
}

DeviceMoment Operation::landed() {
  ps::MutexLock lock(&mu_);
  return landed_;
}

namespace {

// Of this process: a handle of a job that ended never stands for one of the next job.
int64_t NextHandle() {
  static std::atomic<int64_t> last{0};
  return ++last;
}

[[noreturn]] void ThrowNoSuchHandle(int64_t handle) {
  throw UsageError("there is no handle " + std::to_string(handle) +
                   "; was it synchronized already?");
}

}  // namespace

Operations::Operations(WorkerCounters* counters, SpeedMeter* speed)
    : counters_(counters), speed_(speed) {}

int64_t Operations::Begin(const OperationPtr& operation) {
  bool is_first = false;
  {
    ps::MutexLock lock(&mu_);
    if (failed_) throw Error(failure_);
    if (operation->tensor && !operation->tensor->BeginUse()) {
      throw UsageError("'" + operation->name() + "' was released while an operation of it began");
    }
    operation->handle = NextHandle();
    if (operation->tensor) {
      Tensor* const tensor = operation->tensor.get();
      if (operation->begins_round()) {
        operation->round = tensor->rounds++;
        tensor->running.insert(operation->round);
      } else {
        operation->round = tensor->rounds - 1;
      }
      running_.insert(operation);
      is_first = running_.size() == 1;
    }
    const bool is_new = by_handle_.emplace(operation->handle, operation).second;
    BPS_INVARIANT("a handle stands for one operation", is_new,
                  "handle " + std::to_string(operation->handle) + " was given to '" +
                      operation->name() + "' too");
  }
  if (is_first) began_.NotifyAll();
  return operation->handle;
}

OperationPtr Operations::Find(int64_t handle) {
  ps::MutexLock lock(&mu_);
  const auto it = by_handle_.find(handle);
  if (it == by_handle_.end()) ThrowNoSuchHandle(handle);
  return it->second;
}

void Operations::Forget(int64_t handle) {
  OperationPtr last;  // goes without the lock
  ps::MutexLock lock(&mu_);
  const auto it = by_handle_.find(handle);
  if (it == by_handle_.end()) ThrowNoSuchHandle(handle);
  last = std::move(it->second);
  by_handle_.erase(it);
}

void Operations::Finish(const OperationPtr& operation, DeviceMoment landed) {
  if (!operation->ClaimEnd()) return;
  // Before anybody learns of the end, who may then ask for the figures.
  const std::chrono::nanoseconds took = Operation::Clock::now() - operation->started;
  speed_->Record(operation->request.tensor.bytes, operation->started);
  counters_->operations.Add();
  counters_->operation_seconds.Observe(took.count());
  Remove(operation);
  operation->End("", std::move(landed));
}

void Operations::Fail(const OperationPtr& operation, const std::string& error) {
  if (!operation->ClaimEnd()) return;
  counters_->failed_operations.Add();
  NoteError(error);
  Remove(operation);
  operation->End(error, nullptr);
  if (!operation->streams_wait()) return;
  {
    ps::MutexLock lock(&mu_);
    failed_stream_ = true;
  }
  began_.NotifyAll();
  failed_job_.NotifyAll();
}

void Operations::Remove(const OperationPtr& operation) {
  bool idle = false;
  {
    ps::MutexLock lock(&mu_);
    running_.erase(operation);
    idle = running_.empty();
    if (operation->tensor && operation->begins_round()) EndRound(*operation);
  }
  if (idle) ended_.NotifyAll();
  if (operation->tensor) operation->tensor->window.Advance();
  if (operation->tensor && operation->tensor->EndUse()) give_back_(operation->tensor);
}

void Operations::EndRound(const Operation& operation) {
  Tensor* const tensor = operation.tensor.get();
  tensor->running.erase(operation.round);
  tensor->oldest = tensor->running.empty() ? tensor->rounds.load() : *tensor->running.begin();
}

bool Operations::FailAll(const std::string& reason) {
  RunningSet running;
  {
    ps::MutexLock lock(&mu_);
    if (failed_) return false;
    failed_ = true;
    failure_ = reason;
    running.swap(running_);
  }
  for (ps::CondVar* const cond : {&began_, &ended_, &failed_job_}) cond->NotifyAll();
  for (const auto& operation : running) Fail(operation, reason);
  return true;
}

bool Operations::failed() {
  ps::MutexLock lock(&mu_);
  return failed_;
}

std::string Operations::failure() {
  ps::MutexLock lock(&mu_);
  return failure_;
}

void Operations::NoteError(const std::string& error) {
  ps::MutexLock lock(&mu_);
  if (first_error_.empty()) first_error_ = error;
}

std::string Operations::first_error() {
  ps::MutexLock lock(&mu_);
  return first_error_;
}

std::vector<OperationPtr> Operations::Running() {
  ps::MutexLock lock(&mu_);
  return {running_.begin(), running_.end()};
}

size_t Operations::num_running() {
  ps::MutexLock lock(&mu_);
  return running_.size();
}

void Operations::AwaitIdle(double limit_s) {
  ps::MutexLock lock(&mu_);
  // Ended by the last operation or a failure of the job; deadline: BYTEPS_PEER_TIMEOUT_S.
  ended_.WaitFor(&mu_, std::chrono::duration<double>(limit_s),
                 [this]() PS_REQUIRES(mu_) { return failed_ || running_.empty(); });
}

bool Operations::AwaitWork() {
  ps::MutexLock lock(&mu_);
  // Ended by an operation or a failure of the job; deadline: none, an idle thread's.
  began_.Wait(&mu_,
              [this]() PS_REQUIRES(mu_) { return failed_ || failed_stream_ || !running_.empty(); });
  return !failed_;
}

bool Operations::Sleep(double seconds) {
  ps::MutexLock lock(&mu_);
  // Ended by a failure; deadline: the next look.
  failed_job_.WaitFor(&mu_, std::chrono::duration<double>(seconds),
                      [this]() PS_REQUIRES(mu_) { return failed_ || failed_stream_; });
  failed_stream_ = false;
  return !failed_;
}

}  // namespace core
}  // namespace byteps
