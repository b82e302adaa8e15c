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

// The worker of this process, through the jobs that it joins and leaves.
//
// All public functions may be called by any thread; Start and Stop by one at a
// time.  Errors are thrown as Error (the job failed) or UsageError (bad call).
class Worker {
 public:
  Worker() = default;
  ~Worker();

  // Joins the cluster by `channel`; blocks until every node has.
  void Start(const Config& config, const Launch& launch, int num_servers,
             std::unique_ptr<Channel> channel, std::unique_ptr<LossPolicy> losses);

  // Waits for what is in flight (no longer than BYTEPS_PEER_TIMEOUT_S), says
  // goodbye, and closes.  Does nothing when not started.  `failure`: why this process ends, if not
  // because its work is done.
  void Stop(bool suspend, const std::string& failure = "");

  // At the end of the process, before its exit status is known: waits for what is in flight, and
  // has the C library call Stop when it is known.  A status other than 0 is a failure.  What
  // operations use must stay until then.
  void StopAtExit();

  bool started() { return engine() != nullptr; }

  // Whether what is pushed should lie in memory that the transport knows: see
  // net/link/registration_cache.h.
  bool RegistersMemory() { return Started()->RegistersMemory(); }

  // Whether the job failed; once true, only Stop may be called.
  bool failed();

  // Throws Error when the job failed: who waits for streams alone hears of it by this.
  void Check() { Started()->Check(); }

  // Whether streams wait for this sum.  Throws UsageError if there is no such handle.
  bool IsStreamed(int64_t handle) { return Started()->IsStreamed(handle); }

  // Makes tensors known to the servers, by one message to each, and finds room for those on
  // GPUs in pinned memory.  Blocks until the servers have answered.
  void Declare(const std::vector<TensorSpec>& specs) { Started()->Declare(specs); }

  // See Declarations::Release.  Does nothing when not started.  Never blocks.
  void Release(const std::vector<std::string>& names, uint32_t lowest_rank) {
    if (const auto engine = this->engine()) engine->Release(names, lowest_rank);
  }

  // Starts a sum and returns its handle, a positive number.  Blocks only for the
  // first use of a name that was not declared.
  // `known`, in and out: the tensor as the call before knew it, null at first.  With it a tensor is
  // looked up once in a job.
  int64_t PushPull(const PushPullRequest& request, TensorPtr* known = nullptr) {
    return Started()->PushPull(request, known);
  }

  // Whether WaitFor would return true (or throw) at once; of a streamed sum, whether it has come.
  bool Poll(int64_t handle);

  // Blocks until the sum is there (true) or the time is up (false).  When it is there, forgets
  // the handle, and makes `stream` wait until the sum is on the GPU.  Throws Error if the sum
  // failed, once nothing writes into its output any more; UsageError if there is no such handle.
  // The input of a sum that failed may still be read, until Stop has returned.
  bool WaitFor(int64_t handle, DeviceStream stream, std::chrono::nanoseconds limit);
  // Whether it ended, well or not, within this time; the handle stays.
  bool AwaitEnd(int64_t handle, std::chrono::nanoseconds limit);

  // Of a sum that streams wait for: enqueues in `stream` waiting for it and copying it to its
  // tensor, and forgets the handle.  Throws as WaitFor does, for what is known to have failed.
  Landing Land(int64_t handle, DeviceStream stream);

  // Calls `then` once Poll returns true, at once if it does already: on a thread of the engine's,
  // and not to block.  Throws UsageError if there is no such handle.
  void CallAtEnd(int64_t handle, std::function<void()> then);

  std::pair<uint64_t, double> Speed() { return speed_.Get(); }

  double LinkGbps() { return Started()->link_gbps(); }
  std::vector<std::string> ServerHosts() { return Started()->ServerHosts(); }

  // Bytes of the partitions into which a tensor of `bytes` bytes is cut.
  uint32_t PartitionBytes(DType dtype, uint64_t bytes, uint64_t piece_of, bool updated = false) {
    return Started()->plan().PartitionBytes(dtype, bytes, piece_of, updated);
  }

  // Bytes of each server of this tensor.
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

  // What was counted since the process began, and what the queues hold now.
  std::vector<Metric> Metrics();

 private:
  // That of the job, or null.  It lives for as long as a caller is inside.
  std::shared_ptr<Engine> engine();
  // Throws Error when there is none.
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
