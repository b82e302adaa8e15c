// Engine: a worker in one job.
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

// Worker in one job: its declarations, its sums, and the threads that move them.
//
//   PushPull ─▶ Declarations ─▶ Pusher ─▶ channel ─▶ server
//                                                      │
//   Wait ◀── Operations ◀── Puller ◀── channel ◀───────┘
//
// Each part has its own lock, held for bookkeeping only: never while values are copied, memory is
// pinned, or messages are sent.
//
// Thread-safe, even after Stop; but only one thread calls Start and Stop, each once. Throws Error
// (the job failed) or UsageError (bad call).
class Engine : public ChannelUser {
 public:
  // `counters` and `speed` outlive this.
  Engine(const Config& config, const Launch& launch, int num_servers,
         std::unique_ptr<Channel> channel, std::unique_ptr<LossPolicy> losses,
         WorkerCounters* counters, SpeedMeter* speed);
  ~Engine() override;

  void Start();
  void Stop(bool suspend, const std::string& failure);
  // Waits for operations in flight. This is the first step of Stop.
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
  // Throws Error if the job failed.
  void Check();
  bool RegistersMemory() const { return context_.channel->RegistersMemory(); }
  const Plan& plan() const { return context_.plan; }
  double link_gbps() const { return context_.channel->link_gbps(); }
  // Address of each server, or "" if unknown.
  std::vector<std::string> ServerHosts() const;
  WorkerGauges Gauges();

  // Replicas (docs/design/replicas.md).
  //
  // The scheduler's last report; empty before the first.
  ps::ReplicaView Replicas();
  bool is_late() const { return context_.channel->is_late(); }
  void SayReady() { context_.channel->SayReady(); }
  void AskToAdmit(int replica, int ready_epoch) {
    context_.channel->AskToAdmit(replica, ready_epoch);
  }
  // Tensors for which other workers wait for this worker's next push.
  std::vector<std::string> Awaited();
  // Returns the ranks whose values were missing in any sum since the last call.
  std::vector<int> TakeMissing() { return context_.missing.Take(); }
  // Returns this worker's progress with each name. SetRounds adopts another worker's progress.
  ProgressByTensor Rounds() { return declarations_.Rounds(); }
  void SetRounds(const ProgressByTensor& progress) { declarations_.SetRounds(progress); }

  void OnMessage(Message* message) override;
  char* PlaceFor(const MessageHead& head, size_t bytes) override;
  void OnEvent(const ps::MembershipEvent& event) override;
  std::string Report() override;

 private:
  // Declares tensors to the servers.
  std::vector<TensorPtr> Introduce(const std::vector<TensorSpec>& specs);
  TensorPtr Find(const TensorSpec& spec, TensorPtr* known);
  void MakeRoom(const TensorSpec& spec, Tensor* tensor);
  // Returns whether the tensor is small, its values are ready, and no other operation is in flight.
  // The calling thread then copies the tensor as a whole (staged_sum.h).
  bool IsSmallAndAlone(const Operation& operation);
  void Fail(const std::string& reason);

  // Releases streams that wait for failed sums. Fails the job if no later call of the user would
  // report the failure.
  void EndFailedStreams();
  // Stops receiving into the operation's memory. After a failure, call AwaitWriters first.
  void AbandonPlaces(const Operation& operation);
  // Waits until no thread writes into the operation's output, then throws the operation's error.
  [[noreturn]] void ThrowFailure(const OperationPtr& operation, DeviceStream stream);

  // Fails operations that no other thread would fail. Watch, Verdict and Silence are in
  // staged_sum.cc.
  void Watch();
  // Returns why the operation must fail now, or "".
  std::string Verdict(const OperationPtr& operation);
  std::string Silence(const OperationPtr& operation);

  const double peer_timeout_s_;
  const long loops_;
  bool has_awaited_idle_ = false;
  // Whether the job ended for all nodes, so that no goodbye is needed.
  std::atomic<bool> is_over_{false};
  EngineContext context_;
  Declarations declarations_;
  Pusher pusher_;
  Puller puller_;
  ps::Mutex replicas_mu_;
  ps::ReplicaView replicas_ PS_GUARDED_BY(replicas_mu_);
  // Last round of each tensor for whose push other workers were reported to wait.
  std::map<std::string, uint32_t> awaited_ PS_GUARDED_BY(replicas_mu_);
  ps::Mutex failing_mu_;  // held until the timeline has all failed operations
  std::vector<std::thread> threads_;
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_ENGINE_ENGINE_H_
