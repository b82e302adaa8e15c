#include "byteps/engine/worker.h"

#include <string>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/process.h"
#include "byteps/engine/engine.h"
#include "byteps/engine/streamed_sums.h"

namespace byteps {
namespace core {
namespace {

[[noreturn]] void ThrowNoJob(int64_t handle) {
  throw UsageError("there is no handle " + std::to_string(handle) + ": byteps is not initialized");
}

}  // namespace

Worker::~Worker() { Stop(false, ""); }

void Worker::Start(const Config& config, const Launch& launch, int num_servers,
                   std::unique_ptr<Channel> channel, std::unique_ptr<LossPolicy> losses) {
  if (started()) return;
  auto engine = std::make_shared<Engine>(config, launch, num_servers, std::move(channel),
                                         std::move(losses), &counters_, &speed_);
  const MetricsSource source{Role::kWorker, [rank = launch.rank] { return rank; },
                             [this] { return Metrics(); }};
  auto metrics_server = MetricsServer::Make(config, launch.local_rank, source);
  engine->Start();
  metrics_server_ = std::move(metrics_server);
  ps::MutexLock lock(&mu_);
  engine_ = std::move(engine);
}

void Worker::Stop(bool suspend, const std::string& failure) {
  const auto stopped = engine();
  if (!stopped) return;
  stopped->Stop(suspend, failure);
  metrics_server_.reset();
  ps::MutexLock lock(&mu_);
  engine_.reset();
}

void Worker::StopAtExit() {
  const auto stopping = engine();
  if (!stopping) return;
  stopping->AwaitIdle();
#ifdef __GLIBC__
  const auto stop = [](int status, void* worker) {
    if (ps::IsForkedCopy()) return;
    static_cast<Worker*>(worker)->Stop(false,
                                       status == 0 ? "" : "exit status " + std::to_string(status));
  };
  // Exit handlers run in reverse order of registration. The GPU driver registered its handlers
  // earlier, so they run after this one.
  if (on_exit(stop, this) == 0) return;
#endif
  Stop(false);
}

std::shared_ptr<Engine> Worker::engine() {
  ps::MutexLock lock(&mu_);
  return engine_;
}

std::shared_ptr<Engine> Worker::Started() {
  auto engine = this->engine();
  if (!engine) throw Error("byteps is not initialized; call bps.init() first");
  return engine;
}

bool Worker::failed() {
  const auto engine = this->engine();
  return engine && engine->failed();
}

bool Worker::Poll(int64_t handle) {
  const auto engine = this->engine();
  if (!engine) ThrowNoJob(handle);
  return engine->Poll(handle);
}

bool Worker::AwaitEnd(int64_t handle, std::chrono::nanoseconds limit) {
  const auto engine = this->engine();
  if (!engine) ThrowNoJob(handle);
  return engine->AwaitEnd(handle, limit);
}

bool Worker::WaitFor(int64_t handle, DeviceStream stream, std::chrono::nanoseconds limit) {
  const auto engine = this->engine();
  if (!engine) ThrowNoJob(handle);
  return engine->WaitFor(handle, stream, limit);
}

Landing Worker::Land(int64_t handle, DeviceStream stream) {
  const auto engine = this->engine();
  if (!engine) ThrowNoJob(handle);
  return engine->Land(handle, stream);
}

void Worker::CallAtEnd(int64_t handle, std::function<void()> then) {
  const auto engine = this->engine();
  if (!engine) ThrowNoJob(handle);
  engine->CallAtEnd(handle, std::move(then));
}

std::vector<Metric> Worker::Metrics() {
  const auto engine = this->engine();
  return Tell(counters_, engine ? engine->Gauges() : WorkerGauges());
}

}  // namespace core
}  // namespace byteps
