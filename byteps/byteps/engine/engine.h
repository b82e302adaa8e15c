// Engine: a worker while it is in one job.
#ifndef BYTEPS_ENGINE_ENGINE_H_
#define BYTEPS_ENGINE_ENGINE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/base/mutex.h"
#include "byteps/cluster/channel.h"
#include "byteps/device/device.h"
#include "byteps/engine/declarations.h"
#include "byteps/engine/engine_context.h"
#include "byteps/engine/loss_policy.h"
#include "byteps/engine/operation.h"
#include "byteps/engine/puller.h"
#include "byteps/engine/push_pull_request.h"
#include "byteps/engine/pusher.h"
#include "byteps/engine/requests.h"
#include "byteps/engine/speed_meter.h"
#include "byteps/engine/streamed_sums.h"
#include "byteps/engine/tensor.h"
#include "byteps/observe/metrics.h"

namespace byteps {
namespace core {

// A worker while it is in one job: its declarations, its sums, and the threads that move them.
//
//   PushPull ─▶ Declarations ─▶ Pusher ─▶ channel ─▶ server
//                                                      │
//   Wait ◀── Operations ◀── Puller ◀── channel ◀───────┘
//
// Each part has a lock of its own, which is held for bookkeeping only: never while values are
// copied, memory is pinned, or anything is sent.

// All public functions may be called by any thread, also after Stop; Start and Stop once, by one
// at a time.  Errors are thrown as Error (the job failed) or UsageError (bad call).
class Engine : public ChannelUser {
 public:
  // `counters` and `speed` outlive this.
  Engine(const Config& config, const Launch& launch, int num_servers,
         std::unique_ptr<Channel> channel, std::unique_ptr<LossPolicy> losses,
         WorkerCounters* counters, SpeedMeter* speed);
  ~Engine() override;

  void Start();
  void Stop(bool suspend, const std::string& failure);
  // The first thing that Stop does: waits for what is in flight.
  void AwaitIdle();

  std::vector<TensorPtr> Declare(const std::vector<TensorSpec>& specs);
  void Release(const std::vector<std::string>& names, uint32_t lowest_rank) {
    declarations_.Release(names, lowest_rank);
  }
  int64_t PushPull(const PushPullRequest& request, TensorPtr* known);
  bool Poll(int64_t handle);
  bool IsStreamed(int64_t handle);
  Landing Land(int64_t handle, DeviceStream stream);
  bool WaitFor(int64_t handle, DeviceStream stream, std::chrono::nanoseconds limit);
  bool AwaitEnd(int64_t handle, std::chrono::nanoseconds limit);
  void CallAtEnd(int64_t handle, std::function<void()> then);

  bool failed() { return context_.operations.failed(); }
  // Throws Error when the job failed.
  void Check();
  bool RegistersMemory() const { return context_.channel->RegistersMemory(); }
  const Plan& plan() const { return context_.plan; }
  double link_gbps() const { return context_.channel->link_gbps(); }
  // The address of each server; empty where it is not known.
  std::vector<std::string> ServerHosts() const;
  WorkerGauges Gauges();

  // Replicas (docs/design/replicas.md).
  //
  // As the scheduler has told last; without any where it has told nothing.
  ps::ReplicaView Replicas();
  bool is_late() const { return context_.channel->is_late(); }
  void SayReady() { context_.channel->SayReady(); }
  void AskToAdmit(int replica, int life) { context_.channel->AskToAdmit(replica, life); }
  // Tensors of which others wait for the next push of this worker.
  std::vector<std::string> Awaited();
  // Ranks whose values sums have lacked, since this was called last.
  std::vector<int> TakeMissing() { return context_.missing.Take(); }
  // Rounds that this worker has begun of each tensor, and those that another worker says it has.
  ProgressByTensor Rounds() { return declarations_.Rounds(); }
  void SetRounds(const ProgressByTensor& progress) { declarations_.SetRounds(progress); }

  void OnMessage(Message* message) override;
  char* PlaceFor(const MessageHead& head, size_t bytes) override;
  void OnEvent(const ps::MembershipEvent& event) override;
  std::string Report() override;

 private:
  // Makes tensors known to the servers; makes room for one on a GPU.
  std::vector<TensorPtr> Introduce(const std::vector<TensorSpec>& specs);
  TensorPtr Find(const TensorSpec& spec, TensorPtr* known);
  void MakeRoom(const TensorSpec& spec, Tensor* tensor);
  // Whether it is small, its values are there, and nothing else is in flight: then its caller
  // copies it as a whole (staged_sum.h).
  bool IsSmallAndAlone(const Operation& operation);
  void Fail(const std::string& reason);

  // Lets streams go on that wait for sums that failed.  Fails the job where nobody would hear of
  // that.
  void EndFailedStreams();
  // Nothing is received into its memory any more; of one that failed, after AwaitWriters.
  void AbandonPlaces(const Operation& operation);
  // Throws what a failed operation ended with, once nothing writes into its output any more.
  [[noreturn]] void ThrowFailure(const OperationPtr& operation, DeviceStream stream);

  // staged_sum.cc: fails operations that nobody else will.
  void Watch();
  // Why it has to fail now; empty if it has not.
  std::string Verdict(const OperationPtr& operation);
  std::string Silence(const OperationPtr& operation);

  const double peer_timeout_s_;
  const long loops_;
  bool has_awaited_idle_ = false;
  std::atomic<bool> is_over_{false};  // for all nodes: there is nobody to say goodbye to
  EngineContext context_;
  Declarations declarations_;
  Pusher pusher_;
  Puller puller_;
  ps::Mutex replicas_mu_;
  ps::ReplicaView replicas_ PS_GUARDED_BY(replicas_mu_);
  // By tensor, the last round of which this worker heard that others waited for its push.
  std::map<std::string, uint32_t> awaited_ PS_GUARDED_BY(replicas_mu_);
  ps::Mutex failing_mu_;  // held until all that failed is in the timeline
  std::vector<std::thread> threads_;
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_ENGINE_ENGINE_H_
