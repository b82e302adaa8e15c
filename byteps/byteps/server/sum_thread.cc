#include "byteps/server/sum_thread.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "byteps/base/log.h"
#include "byteps/base/probe.h"
#include "byteps/base/steady_time.h"
#include "byteps/base/text.h"
#include "byteps/base/thread_name.h"
#include "byteps/server/feedback.h"
#include "byteps/server/updates.h"

namespace byteps {
namespace core {
namespace {

// To wake a thread takes longer than to add as many bytes.
constexpr size_t kServedHere = 64 << 10;
constexpr auto kNever = Rounds::Clock::time_point::max();
// After this process stood still.  Shorter than the grace of workers (engine_watch.cc), which would
// not know what is late.
constexpr ps::StallWatch::Duration kMostGrace = std::chrono::seconds(3);

// Where this process stood still (base/stall_watch.h), what it waits for may lie in its sockets:
// until then nothing is late.
Rounds::Clock::time_point EndOfGrace(const ps::StallWatch::Stall& stall) {
  return stall.ended + std::min(stall.length, kMostGrace);
}

int TrackOf(ServerContext* context) {
  return context->tracer ? context->tracer->AddThread("engine thread") : 0;
}

}  // namespace

SumThread::SumThread(ServerContext* context, size_t number, OutOfMemoryText out_of_memory_text)
    : context_(context),
      out_of_memory_text_(std::move(out_of_memory_text)),
      rounds_(context, TrackOf(context)),
      thread_([this, number] {
        NameThisThread("engine", number);
        Run();
      }) {}

SumThread::~SumThread() {
  queue_.Close();
  thread_.join();
}

void SumThread::Serve(Partition* partition, Message message) {
  Task task;
  task.partition = partition;
  task.message = std::move(message);
  task.received = SteadyNs();
  if (!ServeHere(&task)) Queue(std::move(task));
}

void SumThread::OnWorkerGone(int rank, const std::string& reason) {
  Task task;
  task.kind = Task::kGone;
  task.rank = rank;
  task.reason = reason;
  Queue(std::move(task));
}

void SumThread::SetAbsent(const std::set<int>& ranks) {
  Task task;
  task.kind = Task::kAbsent;
  task.ranks = ranks;
  Queue(std::move(task));
}

void SumThread::FailAll(const DeclaredTensor* tensor, const std::string& reason) {
  Task task;
  task.kind = Task::kFailAll;
  task.tensor = tensor;
  task.reason = reason;
  Queue(std::move(task));
}

void SumThread::Resume(const DeclaredTensor* tensor, uint32_t first_round) {
  Task task;
  task.kind = Task::kResume;
  task.tensor = tensor;
  task.round = first_round;
  Queue(std::move(task));
}

void SumThread::SetBackup(uint64_t pass) {
  Task task;
  task.kind = Task::kBackup;
  task.number = pass;
  Queue(std::move(task));
}

void SumThread::OnCopied(Partition* partition, uint64_t number) {
  Task task;
  task.kind = Task::kCopied;
  task.partition = partition;
  task.number = number;
  Queue(std::move(task));
}

void SumThread::Adopt(Partition* partition) {
  Task task;
  task.kind = Task::kAdopt;
  task.partition = partition;
  Queue(std::move(task));
}

void SumThread::Call(std::function<void()> call) {
  Task task;
  task.kind = Task::kCall;
  task.call = std::move(call);
  Queue(std::move(task));
}

void SumThread::Queue(Task task) {
  ++waiting_;
  if (task.received == 0) task.received = SteadyNs();
  try {
    queue_.Push(std::move(task));
  } catch (const std::bad_alloc&) {
    --waiting_;
    throw;
  }
}

void SumThread::Run() {
  Task task;
  while (true) {
    Clock::time_point look;
    {
      ps::MutexLock lock(&mu_);
      // What is queued may be what a round waits for.
      if (queue_.Size() == 0) FailLate(Clock::now());
      looks_at_ = look = NextLook();
    }
    bool timed_out = false;
    const bool got =
        look == kNever ? queue_.Pop(&task) : queue_.PopFor(&task, look - Clock::now(), &timed_out);
    if (!got) {
      if (!timed_out) return;
      continue;
    }
    {
      ps::MutexLock lock(&mu_);
      // There may be no moment without work.
      FailLate(Clock::time_point(std::chrono::nanoseconds(task.received)));
      Do(&task);
    }
    --waiting_;
    task = Task();
  }
}

bool SumThread::ServeHere(Task* task) {
  const Partition& partition = *task->partition;
  if (partition.declaration().PartitionSize(partition.index) > kServedHere) return false;
  if (waiting_ > 0 || !mu_.TryLock()) {
    PS_PROBE(kQueuedWhileServing);
    return false;
  }
  PS_PROBE(kServedHere);
  Do(task);
  const Clock::time_point first = rounds_.FirstDeadline();
  const bool early = first < looks_at_;
  if (early) looks_at_ = first;
  mu_.Unlock();
  if (early) {
    PS_PROBE(kLooksSooner);
    Task look;
    look.kind = Task::kLook;
    Queue(std::move(look));
  }
  return true;
}

void SumThread::Do(Task* task) noexcept {
  try {
    Handle(task);
  } catch (const std::bad_alloc& e) {
    OnOutOfMemory(*task, e);
  } catch (const std::exception& e) {
    if (task->kind == Task::kRequest) {
      rounds_.FailPartition(task->partition, task->message, e.what());
    } else {  // rounds that it was about end at their deadline
      BPS_LOG(ERROR) << "server " << context_->channel->rank() << ": " << e.what();
    }
  }
}

void SumThread::Handle(Task* task) {
  switch (task->kind) {
    case Task::kRequest:
      return HandleRequest(task);
    case Task::kGone:
      return rounds_.FailWithout(task->rank, task->reason);
    case Task::kAbsent:
      return rounds_.SetAbsent(task->ranks);
    case Task::kFailAll:
      return rounds_.FailAll(task->tensor, task->reason);
    case Task::kResume:
      return rounds_.Resume(task->tensor, task->round);
    case Task::kLook:
      return;
    case Task::kBackup:
      for (Partition* partition : rounds_.SetBackup(task->number)) GoOn(partition);
      return rounds_.CopyNext();
    case Task::kCopied:
      if (task->partition->copying && task->partition->copying->number == task->number) {
        GoOn(task->partition);
      }
      return;
    case Task::kAdopt:
      rounds_.Adopt(task->partition);
      return rounds_.CopyNext();
    case Task::kCall:
      return task->call();
  }
}

void SumThread::GoOn(Partition* partition) {
  rounds_.GoOn(partition);
  while (!partition->copying && !partition->held.empty()) {
    Task task;
    task.partition = partition;
    task.message = std::move(partition->held.front().first);
    task.received = partition->held.front().second;
    partition->held.pop_front();
    Do(&task);
  }
}

void SumThread::HandleRequest(Task* task) {
  if (task->partition->copying) {
    PS_PROBE(kHeldForBackup);
    task->partition->held.emplace_back(std::move(task->message), task->received);
    return;
  }
  switch (task->message.op) {
    case kStep:
      return ServeStep(context_, &rounds_, task->partition, task->message, task->received);
    case kLoadState:
    case kReadState:
      if (MovesFeedback(task->message.op, task->partition->declaration())) {
        return MoveFeedback(context_, task->partition, task->message, task->received);
      }
      return MoveState(context_, &rounds_, task->partition, task->message, task->received);
    case kGiveSum:
      return rounds_.Give(task->partition, &task->message);
    default:
      return rounds_.Push(task->partition, &task->message, task->received);
  }
}

void SumThread::OnOutOfMemory(const Task& task, const std::bad_alloc& error) {
  if (task.kind != Task::kRequest) {
    // Rounds that it was about end at their deadline.
    BPS_LOG(ERROR) << "server " << context_->channel->rank() << " is out of memory";
    return;
  }
  const std::string reason = out_of_memory_text_(task.message, error);
  BPS_LOG(ERROR) << reason;
  rounds_.FailRoundOf(task.partition, task.message, reason);
}

void SumThread::NoteStall() {
  const auto now = Clock::now();
  const ps::StallWatch::Stall stall = ps::StallWatch::Get()->LastStall(now);
  if (stall.ended == stall_.ended) return;
  stall_ = stall;
  const auto left = EndOfGrace(stall) - now;
  if (left <= Clock::duration::zero()) return;
  BPS_LOG(INFO) << "server " << context_->channel->rank() << " stood still for "
                << Seconds(std::chrono::duration<double>(stall.length).count())
                << ": sums that are late have "
                << Seconds(std::chrono::duration<double>(left).count()) << " more";
}

void SumThread::FailLate(Clock::time_point as_of) {
  if (as_of < rounds_.FirstDeadline()) return;
  NoteStall();
  const Clock::time_point grace_until = EndOfGrace(stall_);
  if (as_of >= grace_until) rounds_.FailLate(as_of, grace_until, stall_.length);
}

SumThread::Clock::time_point SumThread::NextLook() const {
  const Clock::time_point first = rounds_.FirstDeadline();
  return first == kNever ? kNever : std::max(first, EndOfGrace(stall_));
}

}  // namespace core
}  // namespace byteps
