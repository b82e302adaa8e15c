#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/process.h"
#include "byteps/base/protocol.h"
#include "byteps/base/wire.h"
#include "byteps/engine/declarations.h"
#include "byteps/engine/engine.h"
#include "byteps/engine/kept_sums.h"
#include "byteps/engine/staged_sum.h"

namespace byteps {
namespace core {
namespace {

// A partition of at most so many bytes is sent by the thread that calls push_pull, where nothing of
// higher priority waits: waking another thread would take longer.  If it is on a GPU, that thread
// awaits its copy.
constexpr uint64_t kFew = 64 << 10;
// Sums in flight to a server that comes: enough to keep a link busy, and little memory of the
// transport's.
constexpr size_t kGivenAtOnce = 8;

std::vector<Task> TasksOf(const OperationPtr& operation) {
  const Plan::Layout& layout = operation->tensor->layout;
  std::vector<Task> tasks;
  tasks.reserve(layout.order.size());
  for (const uint32_t index : layout.order) {
    Task task;
    task.operation = operation;
    task.index = index;
    task.server = layout.servers[index];
    task.bytes = operation->Sent(index).bytes;
    tasks.push_back(std::move(task));
  }
  return tasks;
}

// While it lives, nobody abandons the output's memory (Operation::AwaitWriters).
class Writing {
 public:
  // Null: nothing is told.
  explicit Writing(Operation* operation)
      : operation_(operation != nullptr && operation->BeginWriting() ? operation : nullptr) {}
  ~Writing() {
    if (operation_ != nullptr) operation_->EndWriting();
  }
  Writing(const Writing&) = delete;
  Writing& operator=(const Writing&) = delete;

  explicit operator bool() const { return operation_ != nullptr; }

 private:
  Operation* const operation_;
};

// Queues partitions whose values are there, once their round may be pushed.
void Queue(const std::shared_ptr<PushScheduler>& scheduler, const OperationPtr& operation,
           std::vector<Task> tasks) {
  operation->tensor->window.PushOrHold(
      operation->round, [scheduler, priority = operation->request.priority,
                         tasks = std::move(tasks)] { scheduler->Add(priority, tasks); });
}

void MarkReady(const OperationPtr& operation) {
  const int64_t now = SteadyNs();
  for (PartitionTimes& times : operation->times) times.ready = now;
}

}  // namespace

Pusher::Pusher(Context* context)
    : context_(context), callers_track_(context->trace->AddTrack("callers")) {}

void Pusher::Add(const OperationPtr& operation) {
  std::vector<Task> tasks = TasksOf(operation);
  if (operation->streams_wait()) {
    const auto all = std::make_shared<const std::vector<Task>>(std::move(tasks));
    const auto copied = [all, scheduler = context_->scheduler](size_t begin, size_t end) {
      const auto first = all->begin();
      for (auto task = first + begin; task != first + end; ++task) {
        if (PartitionTimes* times = task->times()) times->ready = SteadyNs();
      }
      Queue(scheduler, all->front().operation, {first + begin, first + end});
    };
    return operation->staged->CopyToHost(operation->ready, copied);
  }
  const bool is_small = operation->is_copied_by_caller();
  if (!is_small && (!operation->on_gpu() || DeviceCopies::IsDone(operation->ready))) {
    return AddReady(operation, std::move(tasks));
  }
  const auto add_ready = [operation, tasks, scheduler = context_->scheduler] {
    MarkReady(operation);
    Queue(scheduler, operation, tasks);
  };
  if (!is_small) {
    return DeviceCopies::Of(operation->request.tensor.device)
        ->CallAfter(operation->ready, operation->request.stream, add_ready);
  }
  if (operation->staged->CopyToHostNow(add_ready)) AddReady(operation, std::move(tasks));
}

void Pusher::AddReady(const OperationPtr& operation, std::vector<Task> tasks) {
  const int priority = operation->request.priority;
  MarkReady(operation);
  const bool is_few = tasks.size() == 1 && tasks.front().bytes <= kFew;
  const bool goes_at_once = is_few || operation->is_copied_by_caller();
  if (!goes_at_once || !operation->tensor->window.Admits(operation->round)) {
    return Queue(context_->scheduler, operation, std::move(tasks));
  }
  const Task first = tasks.front();
  tasks.erase(tasks.begin());
  const bool goes = context_->scheduler->AddOrTake(priority, first);
  if (!tasks.empty()) context_->scheduler->Add(priority, std::move(tasks));
  if (goes) Advance(first, callers_track_);
}

void Pusher::Loop(int track) {
  Task task;
  while (context_->scheduler->Take(&task)) Advance(std::move(task), track);
}

void Pusher::Advance(Task task, int track) {
  const OperationPtr operation = task.operation;
  if (operation->is_done()) {  // it failed meanwhile
    PS_PROBE(kTaskOfEnded);
    return Drop(task);
  }
  if (task.stage == Task::kTake) {
    if (PartitionTimes* times = task.times()) times->taken = SteadyNs();
  }
  try {
    if (task.stage == Task::kTake) operation->Move(task.index, Operation::Stage::kTaken);
    if (!operation->on_gpu() || task.bytes == 0 || task.stage == Task::kSend) {
      Send(task, track);
    } else if (task.stage == Task::kTake) {
      PrepareFromDevice(task, track);
    } else {
      StartCopy(task, track);
    }
  } catch (const std::exception& e) {  // of any kind: the loop serves other operations, too
    Fail(task, e.what());
  }
}

void Pusher::Fail(const Task& task, const std::string& error) {
  context_->trace->Row(*task.operation, task.index, 0);
  context_->operations.Fail(task.operation, error);
  Drop(task);
}

void Pusher::Drop(const Task& task) { context_->scheduler->Return(task.server, task.bytes); }

void Pusher::PrepareFromDevice(Task task, int track) {
  task.stage = Task::kCopy;
  task.block =
      context_->pool->TakeOrCall(task.bytes, [task, scheduler = context_->scheduler](auto block) {
        Task ready = task;
        ready.block = std::move(block);
        scheduler->Resume(std::move(ready));
      });
  if (!task.block) return PS_PROBE(kPushAwaitsPinned);
  StartCopy(std::move(task), track);
}

void Pusher::StartCopy(Task task, int track) {
  const Operation& operation = *task.operation;
  const char* source = operation.Source(task.index);
  const Copy copy = {task.block.get(), source, task.bytes};
  const int device = operation.request.tensor.device;
  task.operation->Move(task.index, Operation::Stage::kCopying);
  task.stage = Task::kSend;
  const int64_t enqueued = SteadyNs();
  context_->trace->BeginCopy(operation);
  const auto copied = [task, enqueued, trace = context_->trace] {
    if (PartitionTimes* times = task.times()) times->copied = SteadyNs();
    trace->CopySlice(*task.operation, task.index, true, enqueued);
  };
  auto resume = [task, copied, scheduler = context_->scheduler] {
    copied();
    scheduler->Resume(task);
  };
  if (task.bytes > kFew) {
    auto begun = [this, task](const std::string& error) {
      if (error.empty()) return;
      Keep(task.block);
      Fail(task, error);
    };
    return context_->copies.Of(device, CopyLane::kToHost)
        ->Add({copy, std::move(begun), std::move(resume)});
  }
  try {
    constexpr CopyLane kLane = CopyLane::kFewToHost;
    DeviceCopies* const copies = DeviceCopies::Of(device);
    if (!copies->AwaitOrCallAfter(kLane, copies->Enqueue(kLane, {copy}), resume)) return;
  } catch (...) {
    Keep(task.block);
    throw;
  }
  copied();
  Send(task, track);
}

void Pusher::Send(const Task& task, int track) {
  std::string error;
  if (ServerLoss& loss = context_->loss; loss.keeps) {
    ps::ReaderLock lock(&loss.mu);
    error = SendNow(task, track, !loss.held[task.server]);
  } else {
    error = SendNow(task, track, true);
  }
  if (!error.empty()) context_->operations.Fail(task.operation, error);
}

bool Pusher::OffersPlaces(const Operation& operation) const {
  // What is kept must not be the caller's memory (Puller::PlaceFor).  A GPU's pinned memory is
  // taken when the sum comes: there may be less than is awaited.
  return context_->channel->RegistersMemory() && !context_->loss.keeps &&
         !operation.output_on_gpu();
}

std::string Pusher::SendNow(const Task& task, int track, bool goes) {
  const Operation& operation = *task.operation;
  PartitionTimes* const times = task.times();
  const char* source = operation.Source(task.index);
  if (task.block) source = task.block.get();
  std::shared_ptr<void> sending;
  if (operation.staged && task.bytes > 0) {
    sending = operation.staged->BeginSend();
    if (!sending) {
      Drop(task);
      return "";
    }
  }
  // What rounding lost is added once.
  if (operation.is_coded() && task.bytes > 0 && !task.again) operation.Encode(task.index);
  task.operation->Move(task.index, Operation::Stage::kPushed);
  const int64_t now = SteadyNs();
  if (times != nullptr && times->copied == 0) times->copied = now;
  Message message = context_->MakeRequestMessage(  // may throw, and nothing after it
      Request{task.operation, task.index, task.server, now, nullptr});
  const Writing writing(OffersPlaces(operation) ? task.operation.get() : nullptr);
  if (writing) {
    message.place = operation.Target(task.index);
    message.place_bytes = operation.Wanted(task.index).bytes;
  }
  // Until the transport has sent the values, they hold their place in the window, and `task`
  // holds the operation and the pinned memory.
  if (task.bytes > 0) {
    message.SetValues(
        SharedBytes::Borrow(const_cast<char*>(source), task.bytes,
                            [task, times, sending, scheduler = context_->scheduler](char*) {
                              if (times != nullptr) times->sent = SteadyNs();
                              scheduler->Deliver(task.server, task.bytes);
                            }));
  } else {  // it asks for something
    if (times != nullptr) times->sent = now;
    Drop(task);
  }
  BPS_LOG(DEBUG) << "PUSH '" << operation.name() << "' partition " << task.index << " round "
                 << operation.round << " to server " << task.server << ", " << task.bytes
                 << " bytes, priority " << operation.request.priority;
  context_->counters->pushed_partitions.Add();
  context_->counters->pushed_bytes.Add(task.bytes);
  const OperationTrace::Pending pending(context_->trace.get(), operation);
  if (!goes) {
    PS_PROBE(kPushHeldBack);
    return "";
  }
  try {
    context_->channel->Send(message);
  } catch (const std::exception& e) {
    // The values are with the message, and leave the window with it.
    context_->trace->Row(operation, task.index, 0);
    return e.what();
  }
  context_->trace->Slice(operation, task.index, track, "push", now, TraceArrow::kBegins);
  return "";
}

// What a worker does where a server is lost, and another one takes its place:
//
//   lost      nothing is sent to it any more
//   replaced  the new one is told of all tensors, then where this worker goes on in each of them,
//             then it is given the sums that were kept; when it has them, what the old one had not
//             answered is pushed again

// ------------------------------------------------------------------ lost

void Engine::OnServerLost(int server, const std::string& reason) {
  if (!context_.loss.keeps) {
    return Fail(reason + "; this worker has kept no sums from which another server could go on: " +
                "set BYTEPS_REPLACE_SERVERS_S on all nodes");
  }
  const std::string name = context_.loss.has_backups ? "" : declarations_.AnyUpdated();
  if (!name.empty()) {
    return Fail(reason + "; the optimizer state that it had of '" + name +
                "' and of others is lost with it: load the last checkpoint, or set "
                "BYTEPS_BACKUP_STATE=1 on all nodes before");
  }
  BPS_LOG(WARNING) << reason << "; waiting for another server, with " << context_.loss.kept.bytes()
                   << " bytes of sums that others may lack";
  context_.vacancies.Lost(server);
  context_.loss.kept.ForgetSerials(server);
  ps::WriterLock lock(&context_.loss.mu);
  context_.loss.held[server] = true;
  context_.loss.turns[server] = 0;
}

// ------------------------------------------------------------------ replaced

void Engine::OnServerReplaced(int server) {
  context_.vacancies.Replaced(server);
  uint64_t turn = 0;
  {
    ps::WriterLock lock(&context_.loss.mu);
    if (!context_.loss.keeps || !context_.loss.held[server]) return;
    turn = context_.loss.turns[server] = context_.loss.came[server] = ++context_.loss.last_turn;
  }
  declarations_.TellAgain(server, [this, server, turn](const std::string& error) {
    error.empty() ? SayResumes(server, turn) : Fail(error);
  });
}

void Engine::SayResumes(int server, uint64_t turn) {
  // By tensor: the first round that may still be pushed, or whose sum may be given.
  std::map<uint64_t, uint32_t> first = declarations_.OldestRounds();
  for (const KeptSum& sum : context_.loss.kept.Of(server)) {
    uint32_t& oldest = first[sum.tensor->key];
    oldest = std::min(oldest, sum.round);
  }
  WireWriter out;
  out.PutSize(first.size());
  for (const auto& [key, round] : first) {
    out.Put(key);
    out.Put(round);
  }
  context_.channel->Send(MakeRequest(kResume, server, 0, turn, out.Take()));
}

void Engine::OnResumed(const Message& answer) {
  int server = 0;
  {
    ps::WriterLock lock(&context_.loss.mu);
    server = context_.loss.ServerOf(answer.number);
    if (server < 0) return PS_PROBE(kReplacedAgain);
    const std::vector<KeptSum> kept = context_.loss.kept.Of(server);
    context_.loss.gifts[server] = {{kept.begin(), kept.end()}, 0};
  }
  if (answer.failed) return Fail(answer.body);
  GiveNext(server, answer.number);
}

void Engine::GiveNext(int server, uint64_t turn) {
  std::vector<KeptSum> next;
  {
    ps::WriterLock lock(&context_.loss.mu);
    if (context_.loss.turns[server] != turn) return PS_PROBE(kReplacedAgain);
    ServerLoss::Gifts& gifts = context_.loss.gifts[server];
    while (gifts.in_flight < kGivenAtOnce && !gifts.waiting.empty()) {
      next.push_back(std::move(gifts.waiting.front()));
      gifts.waiting.pop_front();
      ++gifts.in_flight;
    }
    if (gifts.in_flight > 0 && next.empty()) return;
  }
  if (next.empty()) return GoOn(server, turn);
  for (const KeptSum& sum : next) Give(server, turn, sum);
}

void Engine::Give(int server, uint64_t turn, const KeptSum& sum) {
  PS_PROBE(kSumGiven);
  PushHeader header;
  header.round = sum.round;
  header.flags = PushHeader::kKeepsSums;
  Message message =
      MakeRequest(kGiveSum, server, sum.tensor->key + sum.index, turn, header.Pack() + sum.lacks);
  message.SetValues(sum.values);
  context_.channel->Send(message);
}

void Engine::OnGiven(const Message& answer) {
  int server = 0;
  {
    ps::WriterLock lock(&context_.loss.mu);
    server = context_.loss.ServerOf(answer.number);
    if (server < 0) return;
    --context_.loss.gifts[server].in_flight;
  }
  if (answer.failed) return Fail(answer.body);
  WireReader in(answer.body);
  const auto round = in.Get<uint32_t>();
  context_.loss.kept.SetSerial(server, answer.key, round, in.Get<uint64_t>());
  GiveNext(server, answer.number);
}

void Engine::Confirm() {
  if (!context_.loss.keeps) return;
  for (int server = 0; server < context_.plan.num_servers(); ++server) {
    ps::ReaderLock lock(&context_.loss.mu);
    if (context_.loss.held[server] || context_.requests.HasOpen(server)) continue;
    if (!context_.loss.kept.Has(server)) continue;
    WireWriter out;
    out.Put(context_.requests.FirstOpen(server));
    const uint64_t number = context_.loss.came[server];
    context_.channel->Send(MakeRequest(kConfirm, server, 0, number, out.Take()));
  }
}

void Engine::OnConfirmed(const Message& answer) {
  ps::ReaderLock lock(&context_.loss.mu);
  // A server that was replaced counts serials anew.
  if (answer.failed || context_.loss.came[answer.peer] != answer.number) return;
  WireReader in(answer.body);
  context_.loss.kept.DropBefore(answer.peer, in.Get<uint64_t>());
}

void Engine::GoOn(int server, uint64_t turn) {
  std::vector<Request> open;
  {
    ps::WriterLock lock(&context_.loss.mu);
    if (context_.loss.turns[server] != turn) return PS_PROBE(kReplacedAgain);
    context_.loss.turns[server] = 0;
    context_.loss.held[server] = false;
    open = context_.requests.TakeBack(server);
  }
  BPS_LOG(INFO) << context_.channel->NameOfServer(server) << " has taken over; " << open.size()
                << " partitions are pushed again";
  declarations_.ReleaseAgain(server);
  for (Request& request : open) PushAgain(std::move(request));
}

void Engine::PushAgain(Request request) {
  PS_PROBE(kPushedAgain);
  const OperationPtr& operation = request.operation;
  Task task;
  task.operation = operation;
  task.index = request.index;
  task.server = request.server;
  task.bytes = operation->Sent(request.index).bytes;
  task.again = true;
  // It was not answered; but nobody waits for its values any more.
  context_.scheduler->Answer(request.server, task.bytes);
  operation->Restart(request.index);
  context_.scheduler->Add(operation->request.priority, {std::move(task)});
}

}  // namespace core
}  // namespace byteps
