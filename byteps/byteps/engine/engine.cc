#include "byteps/engine/engine.h"

#include <algorithm>
#include <string>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/process.h"
#include "byteps/base/protocol.h"
#include "byteps/engine/staged_sum.h"
#include "byteps/engine/streamed_sums.h"
#include "byteps/observe/status_record.h"

namespace byteps {
namespace core {

namespace {

// Throws unless the operation suits its tensor: a tensor is either summed or updated, never both.
// The rounding losses of a summed tensor are loaded and read like the state of an updated tensor.
void CheckUse(const Operation& operation) {
  const Declaration& declaration = operation.tensor->declaration;
  if ((operation.request.op != kPushPull) == (declaration.rule != nullptr)) return;
  if (operation.moves_state() && declaration.feedback) return;
  throw UsageError("'" + declaration.name + "' is " + declaration.Describe() +
                   ": it cannot be asked for anything else");
}

}  // namespace

Engine::Engine(const Config& config, const Launch& launch, int num_servers,
               std::unique_ptr<Channel> channel, std::unique_ptr<LossPolicy> losses,
               WorkerCounters* counters, SpeedMeter* speed)
    : peer_timeout_s_(config.Float("BYTEPS_PEER_TIMEOUT_S")),
      loops_(config.Int("BYTEPS_PUSH_THREAD")),
      context_(config, launch, num_servers, std::move(channel), std::move(losses), counters, speed),
      declarations_(&context_.plan, context_.channel.get(), &context_.vacancies,
                    context_.losses.get(), context_.op_timeout_s),
      pusher_(&context_),
      puller_(&context_) {
  context_.losses->Attach(&context_, &declarations_, [this](const auto& why) { Fail(why); });
  if (context_.losses->keeps_sums()) context_.requests.Track();
  context_.operations.SetGiveBack([this](const TensorPtr& t) { declarations_.GiveBack({t}); });
}

Engine::~Engine() { Stop(false, ""); }

void Engine::Start() {
  context_.channel->Start(this);
  context_.scheduler->SetNics(context_.channel->num_nics());
  // Over RDMA a partition costs little CPU time. So windows (push_scheduler.h) and partition sizes
  // do not depend on the link's rate.
  if (context_.channel->RegistersMemory()) {
    context_.scheduler->IgnoreRate();
  } else {
    context_.plan.SetLink(context_.channel->link_gbps());
  }
  for (long i = 0; i < loops_; ++i) {
    const std::string number = std::to_string(i);
    const int push = context_.trace->AddTrack("push loop " + number);
    const int pull = context_.trace->AddTrack("pull loop " + number);
    threads_.emplace_back([this, i, push] {
      NameThisThread("push", i);
      pusher_.Loop(push);
    });
    threads_.emplace_back([this, i, pull] {
      NameThisThread("pull", i);
      puller_.Loop(pull);
    });
  }
  threads_.emplace_back([this] {
    NameThisThread("watch");
    Watch();
  });
}

void Engine::AwaitIdle() {
  if (threads_.empty() || has_awaited_idle_) return;
  has_awaited_idle_ = true;
  context_.operations.AwaitIdle(peer_timeout_s_);
}

void Engine::Stop(bool suspend, const std::string& failure) {
  if (threads_.empty()) return;
  AwaitIdle();
  if (!is_over_) {
    context_.channel->Leave({suspend, failure, context_.operations.first_error()});
  }
  Fail("byteps was shut down");
  context_.scheduler->Close();
  puller_.Close();
  // The join is ended by the closed scheduler and puller, and the failure; deadline: none.
  for (auto& thread : threads_) thread.join();
  threads_.clear();
  context_.channel->Stop();
  // From here on the transport writes into no memory that requests hold.
  context_.requests.Clear();
}

std::vector<TensorPtr> Engine::Declare(const std::vector<TensorSpec>& specs) {
  std::vector<TensorPtr> tensors = Introduce(specs);
  for (size_t i = 0; i < specs.size(); ++i) MakeRoom(specs[i], tensors[i].get());
  return tensors;
}

std::vector<TensorPtr> Engine::Introduce(const std::vector<TensorSpec>& specs) {
  try {
    return declarations_.Declare(specs);
  } catch (const UsageError&) {
    throw;
  } catch (const Error& e) {
    context_.operations.NoteError(e.what());
    throw;
  }
}

void Engine::MakeRoom(const TensorSpec& spec, Tensor* tensor) {
  if (spec.device == kCpu || tensor->has_room.exchange(true)) return;
  const CurrentDevice current(spec.device);
  context_.pool->Reserve(spec.rule ? AnswerBytes(spec.dtype, spec.bytes) : spec.bytes);
}

TensorPtr Engine::Find(const TensorSpec& spec, TensorPtr* known) {
  if (known == nullptr) return Introduce({spec}).front();
  if (!*known || !declarations_.Own(**known)) *known = Introduce({spec}).front();
  return *known;
}

int64_t Engine::PushPull(const PushPullRequest& request, TensorPtr* known) {
  const TensorSpec& spec = request.tensor;
  Check();
  if (request.pull_begin > std::min(request.pull_end, request.OfferedBytes())) {
    throw UsageError("the wanted part of '" + spec.name + "' ends before it begins");
  }
  if (spec.bytes == 0) {  // nothing to sum
    auto nothing = std::make_shared<Operation>(request, nullptr);
    const int64_t handle = context_.operations.Begin(nothing);
    context_.operations.Finish(nothing, nullptr);
    return handle;
  }
  DeviceMoment ready;
  if (spec.device != kCpu) ready = DeviceCopies::Of(spec.device)->Now(request.stream);
  auto operation = std::make_shared<Operation>(request, Find(spec, known));
  operation->ready = std::move(ready);
  CheckUse(*operation);
  if (operation->on_gpu() && request.op == kPushPull) {
    if (request.streamed) {
      operation->staged = StagedSum::TryMake(*operation, context_.pool_for_streamed);
      if (operation->staged) context_.streamed.Add(operation);
    } else if (IsSmallAndAlone(*operation)) {
      operation->staged = StagedSum::TryMake(*operation, context_.pool_for_small);
    }
  }
  if (!operation->streams_wait()) MakeRoom(spec, operation->tensor.get());
  const int64_t handle = context_.operations.Begin(operation);
  context_.trace->Begin(operation.get());
  try {
    pusher_.Add(operation);
  } catch (const std::exception& e) {  // Wait throws it
    context_.operations.Fail(operation, e.what());
  }
  return handle;
}

bool Engine::IsSmallAndAlone(const Operation& operation) {
  return operation.request.tensor.bytes <= StagedSum::kSmall &&
         context_.operations.num_running() == 0 && DeviceCopies::IsDone(operation.ready);
}

bool Engine::IsStreamed(int64_t handle) { return context_.operations.Find(handle)->streams_wait(); }

void Engine::Check() {
  if (failed()) throw Error(context_.operations.failure());
}

bool Engine::Poll(int64_t handle) { return context_.operations.Find(handle)->is_done(); }

void Engine::CallAtEnd(int64_t handle, std::function<void()> then) {
  context_.operations.Find(handle)->CallAtEnd(std::move(then));
}

Landing Engine::Land(int64_t handle, DeviceStream stream) {
  const OperationPtr operation = context_.operations.Find(handle);
  const auto has_failed = [&] { return operation->is_done() && !operation->error().empty(); };
  Landing landing;
  if (!has_failed()) landing = operation->staged->CopyToDevice(operation, stream);
  context_.operations.Forget(handle);
  // The watcher may have checked the sums before this thread began to wait for this one, so this
  // thread checks, too.
  if (has_failed()) throw Error(operation->error());
  return landing;
}

bool Engine::AwaitEnd(int64_t handle, std::chrono::nanoseconds limit) {
  const OperationPtr operation = context_.operations.Find(handle);
  return operation->AwaitEnd(limit, [this] { context_.channel->ReceiveReady(); });
}

bool Engine::WaitFor(int64_t handle, DeviceStream stream, std::chrono::nanoseconds limit) {
  const OperationPtr operation = context_.operations.Find(handle);
  if (operation->streams_wait()) {
    (void)Land(handle, stream);
    return true;
  }
  if (!operation->AwaitEnd(limit, [this] { context_.channel->ReceiveReady(); })) return false;
  context_.operations.Forget(handle);
  if (!operation->error().empty()) ThrowFailure(operation, stream);
  if (operation->is_copied_by_caller()) {
    context_.small.Add(operation, operation->staged->CopyBack(stream));
    return true;
  }
  if (const DeviceMoment landed = operation->landed()) {  // the values are still being copied
    DeviceCopies::Of(operation->request.tensor.device)->MakeWait(stream, landed);
  }
  return true;
}

void Engine::ThrowFailure(const OperationPtr& operation, DeviceStream stream) {
  const std::string error = operation->error();
  operation->AwaitWriters();
  if (!operation->output_on_gpu()) {
    AbandonPlaces(*operation);
    throw Error(error);
  }
  try {
    DeviceCopies* const copies = DeviceCopies::Of(operation->request.tensor.device);
    copies->MakeWait(stream, copies->CopiedToDevice());
  } catch (const Error&) {
    // The device has failed, so it writes into no memory.
  }
  throw Error(error);
}

void Engine::AbandonPlaces(const Operation& operation) {
  const auto abandon = [this](const char* begin, uint64_t bytes) {
    if (bytes > 0) context_.channel->Abandon(begin, bytes);
  };
  if (!operation.staged) {
    const Operation::Part wanted = operation.WantedOutput();
    return abandon(static_cast<const char*>(operation.request.output) + wanted.offset,
                   wanted.bytes);
  }
  for (uint64_t i = 0; i < operation.tensor->declaration.NumPartitions(); ++i) {
    abandon(operation.Target(i), operation.Wanted(i).bytes);
  }
}

void Engine::Fail(const std::string& reason) {
  ps::MutexLock lock(&failing_mu_);
  if (!context_.operations.FailAll(reason)) return;
  declarations_.Fail(reason);
  for (const Task& task : context_.scheduler->Clear()) {
    context_.trace->Row(*task.operation, task.index, 0);
  }
  for (const Request& request : context_.requests.All()) {
    context_.trace->Row(*request.operation, request.index, 0);
  }
}

std::vector<std::string> Engine::ServerHosts() const {
  std::vector<std::string> hosts;
  for (int server = 0; server < context_.plan.num_servers(); ++server) {
    hosts.push_back(context_.channel->HostOfServer(server));
  }
  return hosts;
}

WorkerGauges Engine::Gauges() {
  WorkerGauges gauges;
  gauges.declared_tensors = declarations_.size();
  gauges.running_operations = context_.operations.num_running();
  gauges.push_queue = context_.scheduler->queued();
  gauges.in_transport = context_.scheduler->under_way();
  gauges.unanswered = context_.requests.size() + declarations_.unanswered();
  gauges.pull_queue = puller_.queued();
  gauges.kept_bytes = context_.losses->kept_bytes();
  const ps::ReplicaView replicas = Replicas();
  gauges.replicas_epoch = replicas.epoch;
  gauges.replicas_absent = std::count(replicas.present.begin(), replicas.present.end(), '0');
  return gauges;
}

void Engine::OnMessage(Message* message) {
  if (message->is_request) return;
  if (context_.losses->OnAnswer(*message)) return;
  if (message->op == kRelease) return declarations_.OnReleased(message->number);
  if (message->op != kDeclare) return puller_.OnAnswer(message);
  if (message->failed) context_.counters->failed_requests.Add();
  declarations_.OnAnswer(message->number, message->failed ? message->body : "");
}

char* Engine::PlaceFor(const MessageHead& head, size_t bytes) {
  const bool is_bare = head.op == kDeclare || head.op == kRelease || head.op == kConfirm;
  return head.is_request || is_bare ? nullptr : puller_.PlaceFor(head, bytes);
}

std::string Engine::Report() {
  const WorkerGauges gauges = Gauges();
  const WorkerCounters& counters = *context_.counters;
  StatusRecord record;
  DescribeProcess(&record);
  record.role = Role::kWorker;
  record.sent_bytes = counters.pushed_bytes.Get();
  record.received_bytes = counters.pulled_bytes.Get();
  record.finished = counters.operations.Get();
  record.failed = counters.failed_operations.Get();
  record.running = gauges.running_operations;
  record.tensors = gauges.declared_tensors;
  record.queued = gauges.push_queue;
  return record.Pack();
}

ps::ReplicaView Engine::Replicas() {
  ps::MutexLock lock(&replicas_mu_);
  return replicas_;
}

std::vector<std::string> Engine::Awaited() {
  std::map<std::string, uint32_t> awaited;
  {
    ps::MutexLock lock(&replicas_mu_);
    if (awaited_.empty()) return {};
    awaited = awaited_;
  }
  return declarations_.NotBegun(awaited);
}

void Engine::OnEvent(const ps::MembershipEvent& event) {
  if (event.kind == ps::MembershipEvent::kReplicas) {
    ps::MutexLock lock(&replicas_mu_);
    replicas_ = event.replicas;
    return;
  }
  if (event.kind == ps::MembershipEvent::kAwaited) {
    ps::MutexLock lock(&replicas_mu_);
    awaited_[event.report] = event.round;
    return;
  }
  if (event.kind == ps::MembershipEvent::kServerLost ||
      event.kind == ps::MembershipEvent::kServerReplaced) {
    if (event.rank < 0 || event.rank >= context_.plan.num_servers()) return;
    const bool lost = event.kind == ps::MembershipEvent::kServerLost;
    return lost ? context_.losses->OnServerLost(event.rank, event.reason)
                : context_.losses->OnServerReplaced(event.rank);
  }
  if (event.kind != ps::MembershipEvent::kFailed) return;
  is_over_ = true;
  Fail(event.reason);
}

}  // namespace core
}  // namespace byteps
