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

  // Sets the function that is called with each released tensor when its last operation has ended.
  // Call before the first Begin.
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

  // End an operation, with success or with an error. Do nothing if the operation has ended already.
  void Finish(const OperationPtr& operation, DeviceMoment landed);
  void Fail(const OperationPtr& operation, const std::string& error);

  // Fails the job: all operations, now and later, fail with `reason`. Returns false if the job had
  // failed before.
  bool FailAll(const std::string& reason);
  bool failed();
  std::string failure();
  // Error of the first operation that failed on any peer, or "".
  std::string first_error();
  // Records an error without an operation, such as that of a declaration.
  void NoteError(const std::string& error);

  // Returns the operations that have not ended.
  std::vector<OperationPtr> Running();
  size_t num_running();
  // Blocks until no operation is running, the job has failed, or `limit_s` seconds have passed.
  void AwaitIdle(double limit_s);
  // Blocks until an operation is running or a streamed operation has failed; then returns true.
  // Returns false if the job fails.
  bool AwaitWork();
  // Blocks for `seconds`, or until a streamed operation fails. Returns false at once if the job
  // fails.
  bool Sleep(double seconds);

 private:
  // Orders operations by their start, so that they also fail in that order.
  struct BeganBefore {
    bool operator()(const OperationPtr& a, const OperationPtr& b) const {
      return a->handle < b->handle;
    }
  };
  using RunningSet = std::set<OperationPtr, BeganBefore>;

  void Remove(const OperationPtr& operation);
  // Adds to the counters the time in which any operation was running. Call when the last one has
  // ended.
  void CountBusy() PS_REQUIRES(mu_);
  // Updates the tensor's open rounds.
  static void EndRound(const Operation& operation);

  WorkerCounters* const counters_;
  SpeedMeter* const speed_;
  std::function<void(const TensorPtr&)> give_back_ = [](const TensorPtr&) {};

  ps::Mutex mu_;
  // These are separate, so that not every sum wakes a sleeping thread.
  ps::CondVar began_;       // the first operation began, or the job failed
  ps::CondVar ended_;       // the last operation ended, or the job failed
  ps::CondVar failed_job_;  // the job failed, or a streamed operation
  bool failed_ PS_GUARDED_BY(mu_) = false;
  bool failed_stream_ PS_GUARDED_BY(mu_) =
      false;  // a streamed operation failed since the last Sleep
  std::string failure_ PS_GUARDED_BY(mu_);
  std::string first_error_ PS_GUARDED_BY(mu_);
  std::unordered_map<int64_t, OperationPtr> by_handle_ PS_GUARDED_BY(mu_);  // until Forget
  RunningSet running_ PS_GUARDED_BY(mu_);
  // Time since which operations have been running without a break.
  Operation::Clock::time_point busy_since_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_OPERATIONS_H_
