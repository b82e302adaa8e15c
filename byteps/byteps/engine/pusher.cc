#include "byteps/engine/pusher.h"

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/process.h"
#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/engine/engine_context.h"
#include "byteps/engine/staged_sum.h"

namespace byteps {
namespace core {
namespace {

// Limit in bytes of a partition that the thread which calls push_pull sends by itself, unless a
// partition of higher priority waits: waking another thread would take longer. On a GPU the caller
// also waits for the copy.
constexpr uint64_t kFew = 64 << 10;

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

// Makes Operation::AwaitWriters wait as long as this object lives.
class Writing {
 public:
  // Does nothing if `operation` is null.
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

// Queues partitions whose values are ready, once the round window admits their round.
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

Pusher::Pusher(EngineContext* context)
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
  if (operation->is_done()) {  // the operation failed meanwhile
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
  } catch (const std::exception& e) {  // any exception: the loop serves other operations, too
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
  const auto send = [&](bool is_there) { return SendNow(task, track, is_there); };
  const std::string error = context_->losses->Send(task.server, std::ref(send));
  if (!error.empty()) context_->operations.Fail(task.operation, error);
}

bool Pusher::OffersPlaces(const Operation& operation) const {
  // A sum that this worker keeps must not be received into the caller's memory (Puller::PlaceFor).
  // Pinned memory for a GPU's sum is taken only when the sum arrives, because there may not be
  // enough for all sums.
  return context_->channel->RegistersMemory() && !context_->losses->keeps_sums() &&
         !operation.output_on_gpu();
}

std::string Pusher::SendNow(const Task& task, int track, bool is_there) {
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
  // The values are encoded only once, because encoding also adds the rounding losses of the last
  // round.
  if (operation.is_coded() && task.bytes > 0 && !task.again) operation.Encode(task.index);
  task.operation->Move(task.index, Operation::Stage::kPushed);
  const int64_t now = SteadyNs();
  if (times != nullptr && times->copied == 0) times->copied = now;
  Message message = context_->MakeRequestMessage(  // the last call that may throw
      Request{task.operation, task.index, task.server, now, nullptr});
  const Writing writing(OffersPlaces(operation) ? task.operation.get() : nullptr);
  if (writing) {
    message.place = operation.Target(task.index);
    message.place_bytes = operation.Wanted(task.index).bytes;
  }
  // The values count in the window until the transport has sent them. Until then `task` holds the
  // operation and its pinned memory.
  if (task.bytes > 0) {
    message.SetValues(
        SharedBytes::Borrow(const_cast<char*>(source), task.bytes,
                            [task, times, sending, scheduler = context_->scheduler](char*) {
                              if (times != nullptr) times->sent = SteadyNs();
                              scheduler->Deliver(task.server, task.bytes);
                            }));
  } else {  // a request without values
    if (times != nullptr) times->sent = now;
    Drop(task);
  }
  BPS_LOG(DEBUG) << "PUSH '" << operation.name() << "' partition " << task.index << " round "
                 << operation.round << " to server " << task.server << ", " << task.bytes
                 << " bytes, priority " << operation.request.priority;
  context_->counters->pushed_partitions.Add();
  context_->counters->pushed_bytes.Add(task.bytes);
  const OperationTrace::Pending pending(context_->trace.get(), operation);
  if (!is_there) {
    PS_PROBE(kPushHeldBack);
    return "";
  }
  try {
    context_->channel->Send(message);
  } catch (const std::exception& e) {
    // The message owns the values. They leave the window when the message is destroyed.
    context_->trace->Row(operation, task.index, 0);
    return e.what();
  }
  context_->trace->Slice(operation, task.index, track, "push", now, TraceArrow::kBegins);
  return "";
}

}  // namespace core
}  // namespace byteps
