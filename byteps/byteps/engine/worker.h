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

  // Waits for operations in flight (BYTEPS_PEER_TIMEOUT_S at most), says goodbye, and closes. No
  // effect if not started. `failure`: why this process ends, or "" if its work is done.
  void Stop(bool suspend, const std::string& failure = "");

  // Call at the end of the process. Waits for operations in flight, and registers Stop as an exit
  // handler, which learns the exit status: other than 0 is a failure. Memory of operations must
  // stay valid until then.
  void StopAtExit();

  bool started() { return engine() != nullptr; }

  // Whether pushed values should lie in memory that the transport has registered
  // (net/link/registration_cache.h).
  bool RegistersMemory() { return Started()->RegistersMemory(); }

  // Whether the job failed. If so, only Stop may be called.
  bool failed();

  // Throws Error if the job failed. Needed by callers that only let streams wait.
  void Check() { Started()->Check(); }

  // Whether streams wait for this sum. Throws UsageError if there is no such handle.
  bool IsStreamed(int64_t handle) { return Started()->IsStreamed(handle); }

  // Declares tensors to the servers, all in one message per server, and reserves pinned memory for
  // those on GPUs. Blocks until the servers have answered.
  void Declare(const std::vector<TensorSpec>& specs) { Started()->Declare(specs); }

  // See Declarations::Release. No effect if not started. Never blocks.
  void Release(const std::vector<std::string>& names, uint32_t lowest_rank) {
    if (const auto engine = this->engine()) engine->Release(names, lowest_rank);
  }

  // Starts a sum and returns its handle, a positive number. Blocks only for the first use of a name
  // that was not declared. `known`, in and out: the tensor, as the last call returned it, null at
  // first. It saves the look-up by name.
  int64_t PushPull(const PushPullRequest& request, TensorPtr* known = nullptr) {
    return Started()->PushPull(request, known);
  }

  // Whether WaitFor would return true (or throw) at once; for a streamed sum, whether it has
  // arrived.
  bool Poll(int64_t handle);

  // Blocks until the sum has arrived (returns true) or the time is up (returns false). If it has
  // arrived, drops the handle, and makes `stream` wait until the sum is on the GPU. Throws Error if
  // the sum failed, once nothing writes into its output any more; UsageError if there is no such
  // handle. The input of a failed sum may still be read until Stop has returned.
  bool WaitFor(int64_t handle, DeviceStream stream, std::chrono::nanoseconds limit);
  // Returns whether the operation ended in time, well or not. Keeps the handle.
  bool AwaitEnd(int64_t handle, std::chrono::nanoseconds limit);

  // Streamed sums: enqueues in `stream` the wait for the sum and the copies to its tensor, and
  // drops the handle. Throws as WaitFor does, if the failure is known by now.
  Landing Land(int64_t handle, DeviceStream stream);

  // Calls `then` once Poll returns true, or at once if it does. Runs on a thread of the engine, and
  // must not block. Throws UsageError if there is no such handle.
  void CallAtEnd(int64_t handle, std::function<void()> then);

  std::pair<uint64_t, double> Speed() { return speed_.Get(); }

  double LinkGbps() { return Started()->link_gbps(); }
  std::vector<std::string> ServerHosts() { return Started()->ServerHosts(); }

  // Partition size, in bytes, for a tensor of `bytes` bytes.
  uint32_t PartitionBytes(DType dtype, uint64_t bytes, uint64_t piece_of, bool updated = false) {
    return Started()->plan().PartitionBytes(dtype, bytes, piece_of, updated);
  }

  // Bytes of this tensor on each server.
  std::vector<uint64_t> BytesPerServer(const TensorSpec& spec) {
    return Started()->plan().BytesPerServer(spec);
  }

  // Replicas: see Engine.
  ps::ReplicaView Replicas() { return Started()->Replicas(); }
  std::vector<std::string> Awaited() { return Started()->Awaited(); }
  bool IsLate() { return Started()->is_late(); }
  void SayReady() { Started()->SayReady(); }
  void AskToAdmit(int replica, int life) { Started()->AskToAdmit(replica, life); }
  std::vector<int> TakeMissing() { return Started()->TakeMissing(); }
  ProgressByTensor Rounds() { return Started()->Rounds(); }
  void SetRounds(const ProgressByTensor& progress) { Started()->SetRounds(progress); }

  // Counters since the process began, and the current lengths of queues.
  std::vector<Metric> Metrics();

 private:
  // The engine of the current job, or null. It lives while a caller holds it.
  std::shared_ptr<Engine> engine();
  // The engine of the current job. Throws Error if there is none.
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
