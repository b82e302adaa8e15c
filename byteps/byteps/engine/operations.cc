#include "byteps/engine/operations.h"

#include <atomic>
#include <chrono>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/engine/operation.h"
#include "byteps/engine/speed_meter.h"

namespace byteps {
namespace core {
namespace {

// Returns a handle that is unique in the process. So a handle of an earlier job is never valid in
// the next.
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
      if (is_first) busy_since_ = operation->started;
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
  OperationPtr last;  // destroyed after the lock is released
  ps::MutexLock lock(&mu_);
  const auto it = by_handle_.find(handle);
  if (it == by_handle_.end()) ThrowNoSuchHandle(handle);
  last = std::move(it->second);
  by_handle_.erase(it);
}

void Operations::Finish(const OperationPtr& operation, DeviceMoment landed) {
  if (!operation->ClaimEnd()) return;
  // The operation is counted before End, because a thread that sees the end may read the counters.
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
    const bool was_running = running_.erase(operation) > 0;
    idle = running_.empty();
    if (was_running && idle) CountBusy();
    if (operation->tensor && operation->begins_round()) EndRound(*operation);
  }
  if (idle) ended_.NotifyAll();
  if (operation->tensor) operation->tensor->window.Advance();
  if (operation->tensor && operation->tensor->EndUse()) give_back_(operation->tensor);
}

void Operations::CountBusy() {
  const std::chrono::nanoseconds busy = Operation::Clock::now() - busy_since_;
  counters_->busy_ns.Add(busy.count());
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
    if (!running.empty()) CountBusy();
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
  // The wait is ended by the last operation or a failure; deadline: BYTEPS_PEER_TIMEOUT_S.
  ended_.WaitFor(&mu_, std::chrono::duration<double>(limit_s),
                 [this]() PS_REQUIRES(mu_) { return failed_ || running_.empty(); });
}

bool Operations::AwaitWork() {
  ps::MutexLock lock(&mu_);
  // The wait is ended by an operation, or a failure of the job; deadline: none, the thread is idle.
  began_.Wait(&mu_,
              [this]() PS_REQUIRES(mu_) { return failed_ || failed_stream_ || !running_.empty(); });
  return !failed_;
}

bool Operations::Sleep(double seconds) {
  ps::MutexLock lock(&mu_);
  // The wait is ended by a failure; deadline: the given time.
  failed_job_.WaitFor(&mu_, std::chrono::duration<double>(seconds),
                      [this]() PS_REQUIRES(mu_) { return failed_ || failed_stream_; });
  failed_stream_ = false;
  return !failed_;
}

}  // namespace core
}  // namespace byteps
