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
#endif  // BYTEPS_ENGINE_OPERATIONS_H_
