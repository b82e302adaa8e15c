#ifndef BYTEPS_ENGINE_OPERATIONS_H_
#define BYTEPS_ENGINE_OPERATIONS_H_

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/device/device_copies.h"
#include "byteps/engine/operation.h"
#include "byteps/engine/speed_meter.h"
#include "byteps/engine/tensor.h"
#include "byteps/observe/metrics.h"

namespace byteps {
namespace core {

// The operations of one job, by handle. Thread-safe.
class Operations {
 public:
  // The arguments outlive this.
  Operations(WorkerCounters* counters, SpeedMeter* speed);

  // `give_back` is called with each released tensor whose last operation has ended. Call before the
  // first Begin.
  void SetGiveBack(std::function<void(const TensorPtr&)> give_back) {
    give_back_ = std::move(give_back);
  }

  // Assigns a round and a handle, a positive number that is unique in this process. Throws Error if
  // the job failed, UsageError if the tensor was released.
  int64_t Begin(const OperationPtr& operation);

  // Throws UsageError if there is no such handle.
  OperationPtr Find(int64_t handle);
  // Makes the handle invalid. Throws UsageError if there is no such handle.
  void Forget(int64_t handle);

  // End an operation. No effect if it has ended already.
  void Finish(const OperationPtr& operation, DeviceMoment landed);
  void Fail(const OperationPtr& operation, const std::string& error);

  // Fails the job: all operations, now and later. Returns false if it had failed before.
  bool FailAll(const std::string& reason);
  bool failed();
  std::string failure();
  // Error of the first operation that failed on any peer, or "".
  std::string first_error();
  // Records an error without an operation, such as that of a declaration.
  void NoteError(const std::string& error);

  // Operations that have not ended.
  std::vector<OperationPtr> Running();
  size_t num_running();
  // Blocks until no operation is running, the job failed, or the time is up.
  void AwaitIdle(double limit_s);
  // Blocks until operations are running or a streamed one failed (returns true), or the job failed
  // (returns false).
  bool AwaitWork();
  // Blocks for `seconds`, or until a streamed operation fails. Returns false at once if the job
  // fails.
  bool Sleep(double seconds);

 private:
  // In order of their start, so that they also fail in that order.
  struct BeganBefore {
    bool operator()(const OperationPtr& a, const OperationPtr& b) const {
      return a->handle < b->handle;
    }
  };
  using RunningSet = std::set<OperationPtr, BeganBefore>;

  void Remove(const OperationPtr& operation);
  // Adds the time since the first of the operations that ran; none runs any more.
  void CountBusy() PS_REQUIRES(mu_);
  // Updates the tensor's open rounds.
  static void EndRound(const Operation& operation);

  WorkerCounters* const counters_;
  SpeedMeter* const speed_;
  std::function<void(const TensorPtr&)> give_back_ = [](const TensorPtr&) {};

  ps::Mutex mu_;
  // Separate variables, so that a sleeping thread is not woken with every sum.
  ps::CondVar began_;       // the first operation began, or the job failed
  ps::CondVar ended_;       // the last operation ended, or the job failed
  ps::CondVar failed_job_;  // the job failed, or a streamed operation
  bool failed_ PS_GUARDED_BY(mu_) = false;
  bool failed_stream_ PS_GUARDED_BY(mu_) = false;  // since the last Sleep
  std::string failure_ PS_GUARDED_BY(mu_);
  std::string first_error_ PS_GUARDED_BY(mu_);
  std::unordered_map<int64_t, OperationPtr> by_handle_ PS_GUARDED_BY(mu_);  // until waited for
  RunningSet running_ PS_GUARDED_BY(mu_);
  Operation::Clock::time_point busy_since_ PS_GUARDED_BY(mu_);  // while some are running
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_OPERATIONS_H_
