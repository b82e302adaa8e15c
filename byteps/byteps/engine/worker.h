#ifndef BYTEPS_ENGINE_WORKER_H_
#define BYTEPS_ENGINE_WORKER_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/base/mutex.h"
#include "byteps/cluster/channel.h"
#include "byteps/device/device.h"
#include "byteps/engine/declarations.h"
#include "byteps/engine/engine.h"
#include "byteps/engine/loss_policy.h"
#include "byteps/engine/push_pull_request.h"
#include "byteps/engine/speed_meter.h"
#include "byteps/engine/streamed_sums.h"
#include "byteps/engine/tensor.h"
#include "byteps/observe/metrics.h"
#include "byteps/observe/metrics_server.h"

namespace byteps {
namespace core {

// The worker of this process, across the jobs that it joins and leaves.
//
// Thread-safe, but only one thread at a time may call Start and Stop. Throws Error (the job failed)
// or UsageError (bad call).
class Worker {
 public:
  Worker() = default;
  ~Worker();

  // Joins the cluster by `channel`. Blocks until every node has joined.
  void Start(const Config& config, const Launch& launch, int num_servers,
             std::unique_ptr<Channel> channel, std::unique_ptr<LossPolicy> losses);

  // Waits for operations in flight (BYTEPS_PEER_TIMEOUT_S at most), leaves the job, and closes the
  // channel. Does nothing if the worker was not started. `suspend`: whether the worker will join
  // again. `failure`: the reason if this process ends before its work is done, otherwise "".
  void Stop(bool suspend, const std::string& failure = "");

  // Prepares the end of the process: waits for operations in flight, and registers Stop as an exit
  // handler. The handler gets the exit status; a status other than 0 is a failure. The memory of
  // operations must stay valid until the handler runs.
  void StopAtExit();

  bool started() { return engine() != nullptr; }

  // Returns whether pushed values should lie in memory that the transport has registered
  // (net/link/registration_cache.h).
  bool RegistersMemory() { return Started()->RegistersMemory(); }

  // Returns whether the job failed. If so, only Stop may be called.
  bool failed();

  // Throws Error if the job failed. Needed by callers that never wait for a sum on the host,
  // because streams wait for it.
  void Check() { Started()->Check(); }

  // Returns whether streams wait for this sum. Throws UsageError if there is no such handle.
  bool IsStreamed(int64_t handle) { return Started()->IsStreamed(handle); }

  // Declares tensors to the servers, all in one message per server, and reserves pinned memory for
  // tensors on GPUs. Blocks until the servers have answered.
  void Declare(const std::vector<TensorSpec>& specs) { Started()->Declare(specs); }

  // Releases names, as Declarations::Release does. Does nothing if the worker was not started.
  // Never blocks.
  void Release(const std::vector<std::string>& names, uint32_t lowest_rank) {
    if (const auto engine = this->engine()) engine->Release(names, lowest_rank);
  }

  // Starts a sum and returns its handle, a positive number. Blocks only at the first use of a name
  // that was not declared. `known` saves the look-up by name: pass a variable that is null at
  // first, and the same variable in later calls for this tensor.
  int64_t PushPull(const PushPullRequest& request, TensorPtr* known = nullptr) {
    return Started()->PushPull(request, known);
  }

  // Returns whether WaitFor would return true, or throw, at once. For a streamed sum, returns
  // whether the sum has arrived.
  bool Poll(int64_t handle);

  // Blocks until the sum has arrived, and returns true. Returns false after `limit`. If the sum has
  // arrived, drops the handle, and makes `stream` wait until the sum is on the GPU. If the sum
  // failed, throws Error, when no thread writes into its output any more. Throws UsageError if
  // there is no such handle. The transport may read the input of a failed sum until Stop has
  // returned.
  bool WaitFor(int64_t handle, DeviceStream stream, std::chrono::nanoseconds limit);
  // Blocks until the operation has ended, with success or not, for at most `limit`. Returns whether
  // it has ended. Keeps the handle.
  bool AwaitEnd(int64_t handle, std::chrono::nanoseconds limit);

  // For streamed sums: enqueues in `stream` a wait for the sum and the copies to its tensor, and
  // drops the handle. If the sum is known to have failed, throws like WaitFor.
  Landing Land(int64_t handle, DeviceStream stream);

  // Calls `then` as soon as Poll returns true, which may be at once. A thread of the engine makes
  // the call; `then` must not block. Throws UsageError if there is no such handle.
  void CallAtEnd(int64_t handle, std::function<void()> then);

  std::pair<uint64_t, double> Speed() { return speed_.Get(); }

  double LinkGbps() { return Started()->link_gbps(); }
  std::vector<std::string> ServerHosts() { return Started()->ServerHosts(); }

  // Returns the partition size, in bytes, for a tensor of `bytes` bytes.
  uint32_t PartitionBytes(DType dtype, uint64_t bytes, uint64_t piece_of, bool updated = false) {
    return Started()->plan().PartitionBytes(dtype, bytes, piece_of, updated);
  }

  // Returns the bytes of this tensor on each server.
  std::vector<uint64_t> BytesPerServer(const TensorSpec& spec) {
    return Started()->plan().BytesPerServer(spec);
  }

  // Replicas: see Engine.
  ps::ReplicaView Replicas() { return Started()->Replicas(); }
  std::vector<std::string> Awaited() { return Started()->Awaited(); }
  bool IsLate() { return Started()->is_late(); }
  void SayReady() { Started()->SayReady(); }
  void AskToAdmit(int replica, int ready_epoch) { Started()->AskToAdmit(replica, ready_epoch); }
  std::vector<int> TakeMissing() { return Started()->TakeMissing(); }
  ProgressByTensor Rounds() { return Started()->Rounds(); }
  void SetRounds(const ProgressByTensor& progress) { Started()->SetRounds(progress); }

  // Returns the counters since the process began, and the current lengths of queues.
  std::vector<Metric> Metrics();

 private:
  // Returns the engine of the current job, or null. The engine lives as long as a caller holds it.
  std::shared_ptr<Engine> engine();
  // Returns the engine of the current job. Throws Error if there is none.
  std::shared_ptr<Engine> Started();

  SpeedMeter speed_;
  WorkerCounters counters_;
  std::unique_ptr<MetricsServer> metrics_server_;
  ps::Mutex mu_;
  std::shared_ptr<Engine> engine_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_WORKER_H_
