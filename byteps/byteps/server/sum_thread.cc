// The threads of a server that add, and the sum of a round that they add to.
#include "byteps/server/sum_thread.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/process.h"
#include "byteps/base/stall_watch.h"
#include "byteps/server/declared_tensor.h"
#include "byteps/server/partition.h"
#include "byteps/server/reducer.h"
#include "byteps/server/rounds.h"
#include "byteps/server/scratch.h"
#include "byteps/server/server_context.h"

namespace byteps {
namespace core {
namespace {

// The thread that received so many bytes, and has them in its cache, adds them in the time in which
// another one wakes.  It does no more of that: it is needed to receive.  To decode blocks, or to
// make a step of an optimizer, takes longer.
constexpr size_t kServedHere = 128 << 10;
constexpr size_t kFewServedHere = 64 << 10;
constexpr auto kNever = Rounds::Clock::time_point::max();
// Pause before another attempt, if there was no memory to fail what is late.
constexpr auto kLookAgain = std::chrono::milliseconds(100);
// After this process stood still.  Shorter than the grace of workers (engine/staged_sum.cc),
// which would not know what is late.
constexpr ps::StallWatch::Duration kMostGrace = std::chrono::seconds(3);

// Where this process stood still (base/process.h), what it waits for may lie in its sockets:
// until then nothing is late.
Rounds::Clock::time_point EndOfGrace(const ps::StallWatch::Stall& stall) {
  return stall.ended + std::min(stall.length, kMostGrace);
}

int TrackOf(ServerContext* context) {
  return context->tracer ? context->tracer->AddThread("engine thread") : 0;
}

}  // namespace

SumThread::SumThread(ServerContext* context, size_t number, OutOfMemoryText out_of_memory_text,
                     Rounds::Freed freed)
    : context_(context),
      out_of_memory_text_(std::move(out_of_memory_text)),
      rounds_(context, TrackOf(context), std::move(freed)),
      thread_([this, number] {
        NameThisThread("engine", number);
        Run();
      }) {}

SumThread::~SumThread() {
  queue_.Close();
  // Ended by the end of its thread, which was told; deadline: none.
  thread_.join();
}

void SumThread::Serve(std::shared_ptr<Partition> partition, Message message) {
  Task task;
  task.partition = std::move(partition);
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

void SumThread::FailAll(std::shared_ptr<const DeclaredTensor> tensor, const std::string& reason) {
  Task task;
  task.kind = Task::kFailAll;
  task.tensor = std::move(tensor);
  task.reason = reason;
  Queue(std::move(task));
}

void SumThread::Resume(std::shared_ptr<const DeclaredTensor> tensor, uint32_t first_round) {
  Task task;
  task.kind = Task::kResume;
  task.tensor = std::move(tensor);
  task.round = first_round;
  Queue(std::move(task));
}

void SumThread::Release(std::shared_ptr<const DeclaredTensor> tensor, int rank) {
  Task task;
  task.kind = Task::kRelease;
  task.tensor = std::move(tensor);
  task.rank = rank;
  Queue(std::move(task));
}

void SumThread::Free(std::vector<std::shared_ptr<Partition>> partitions) {
  Task task;
  task.kind = Task::kFree;
  task.freed = std::move(partitions);
  Queue(std::move(task));
}

void SumThread::SetBackup(uint64_t pass) {
  Task task;
  task.kind = Task::kBackup;
  task.number = pass;
  Queue(std::move(task));
}

void SumThread::OnCopied(std::shared_ptr<Partition> partition, uint64_t number) {
  Task task;
  task.kind = Task::kCopied;
  task.partition = std::move(partition);
  task.number = number;
  Queue(std::move(task));
}

void SumThread::Adopt(std::shared_ptr<Partition> partition) {
  Task task;
  task.kind = Task::kAdopt;
  task.partition = std::move(partition);
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
      const bool is_told = queue_.Size() > 0 || FailLate(Clock::now());
      look = is_told ? NextLook() : Clock::now() + kLookAgain;
      looks_at_ = look;
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
  const Declaration& d = partition.declaration();
  const size_t most = IsBlock(d.dtype) || d.rule ? kFewServedHere : kServedHere;
  if (d.PartitionSize(partition.index) > most) return false;
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
    try {
      Queue(std::move(look));
    } catch (const std::bad_alloc&) {
      // The next request that is served here tries again.
      ps::MutexLock lock(&mu_);
      looks_at_ = kNever;
    }
  }
  return true;
}

void SumThread::Do(Task* task) noexcept {
  const auto work = [&]() PS_REQUIRES(mu_) { Handle(task); };
  reserve_.Survive(work, [&](const std::exception& e) PS_REQUIRES(mu_) { OnFailure(task, e); });
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
      return rounds_.FailAll(task->tensor.get(), task->reason);
    case Task::kResume:
      return rounds_.Resume(task->tensor.get(), task->round);
    case Task::kRelease:
      return rounds_.Release(task->tensor.get(), task->rank);
    case Task::kFree:
      return rounds_.Free(task->freed);
    case Task::kLook:
      return;
    case Task::kBackup:
      for (Partition* partition : rounds_.SetBackup(task->number)) GoOn(partition);
      return rounds_.CopyNext();
    case Task::kCopied:
      if (task->partition->copying && task->partition->copying->number == task->number) {
        GoOn(task->partition.get());
      }
      return;
    case Task::kAdopt:
      rounds_.Adopt(task->partition.get());
      return rounds_.CopyNext();
    case Task::kCall:
      return task->call();
  }
}

void SumThread::GoOn(Partition* partition) {
  const std::shared_ptr<Partition> stays = partition->shared_from_this();
  const Copying what = std::move(*partition->copying);
  partition->copying.reset();
  const auto work = [&]() PS_REQUIRES(mu_) { rounds_.GoOn(partition, what); };
  reserve_.Survive(work, [&](const std::exception& e) PS_REQUIRES(mu_) {
    const std::string reason = "server " + std::to_string(context_->channel->rank()) +
                               " could not go on with '" + partition->declaration().name +
                               "' once it was copied: " + e.what() + "; " + DescribeFreeMemory();
    BPS_LOG(ERROR) << reason;
    rounds_.FailCopied(partition, what, reason);
  });
  while (!partition->copying && !partition->held.empty()) {
    Task task;
    task.partition = stays;
    task.message = std::move(partition->held.front().first);
    task.received = partition->held.front().second;
    partition->held.pop_front();
    Do(&task);
  }
}

void SumThread::HandleRequest(Task* task) {
  Partition* const partition = task->partition.get();
  if (partition->copying) {
    PS_PROBE(kHeldForBackup);
    partition->held.emplace_back(std::move(task->message), task->received);
    return;
  }
  if (partition->is_freed) {
    return context_->Refuse(task->message,
                            "'" + partition->declaration().name + "' was released by all members");
  }
  switch (task->message.op) {
    case kStep:
      return ServeStep(context_, &rounds_, partition, task->message, task->received);
    case kLoadState:
    case kReadState:
      if (MovesFeedback(task->message.op, partition->declaration())) {
        return MoveFeedback(context_, partition, task->message, task->received);
      }
      return MoveState(context_, &rounds_, partition, task->message, task->received);
    case kGiveSum:
      return rounds_.Give(partition, &task->message);
    default:
      return rounds_.Push(partition, &task->message, task->received);
  }
}

void SumThread::OnFailure(Task* task, const std::exception& error) {
  const auto* const no_memory = dynamic_cast<const std::bad_alloc*>(&error);
  if (task->kind == Task::kRequest && no_memory != nullptr) {
    const std::string reason = out_of_memory_text_(task->message, *no_memory);
    BPS_LOG(ERROR) << reason;
    return rounds_.FailRoundOf(task->partition.get(), task->message, reason);
  }
  if (task->kind == Task::kRequest) {
    return rounds_.FailPartition(task->partition.get(), task->message, error.what());
  }
  const bool may_be_repeated = task->kind == Task::kGone || task->kind == Task::kFailAll ||
                               task->kind == Task::kResume || task->kind == Task::kRelease ||
                               task->kind == Task::kFree || task->kind == Task::kBackup ||
                               task->kind == Task::kAdopt;
  if (no_memory != nullptr && may_be_repeated) return Handle(task);
  // Rounds that it was about end at their deadline.
  BPS_LOG(ERROR) << "server " << context_->channel->rank() << ": " << error.what() << "; "
                 << DescribeFreeMemory();
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

bool SumThread::FailLate(Clock::time_point as_of) noexcept {
  if (as_of < rounds_.FirstDeadline()) return true;
  const auto look = [&]() PS_REQUIRES(mu_) { LookAtLate(as_of); };
  return reserve_.Survive(look, [&](const std::exception& e) PS_REQUIRES(mu_) {
    BPS_LOG(ERROR) << "server " << context_->channel->rank()
                   << " could not fail what is late: " << e.what() << "; " << DescribeFreeMemory();
    LookAtLate(as_of);
  });
}

void SumThread::LookAtLate(Clock::time_point as_of) {
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
