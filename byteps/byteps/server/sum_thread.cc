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
#include "byteps/server/feedback.h"
#include "byteps/server/partition.h"
#include "byteps/server/round_loss_policy.h"
#include "byteps/server/rounds.h"
#include "byteps/server/server_context.h"
#include "byteps/server/updates.h"

namespace byteps {
namespace core {
namespace {

// Limit in bytes of a partition that the receiving thread adds by itself. The values are in its
// core's cache, and waking another thread would take as long. Adding larger partitions would keep
// it from receiving. The second limit is for blocks and optimizer steps, which take longer.
constexpr size_t kServedHere = 128 << 10;
constexpr size_t kFewServedHere = 64 << 10;
constexpr auto kNever = Rounds::Clock::time_point::max();
// Pause before the next attempt to fail late rounds, if memory was too short for the last attempt.
constexpr auto kLookAgain = std::chrono::milliseconds(100);
// Longest extra time for pushes after this process stood still. The workers' extra time
// (engine/staged_sum.cc) is longer, because servers know which workers are late.
constexpr ps::StallWatch::Duration kMostGrace = std::chrono::seconds(3);

// Returns the time until which no round counts as late. After this process stood still
// (base/process.h), pushes may lie unread in its sockets.
Rounds::Clock::time_point EndOfGrace(const ps::StallWatch::Stall& stall) {
  return stall.ended + std::min(stall.length, kMostGrace);
}

int TrackOf(ServerContext* context) {
  return context->tracer ? context->tracer->AddThread("engine thread") : 0;
}

}  // namespace

SumThread::SumThread(ServerContext* context, size_t number, OutOfMemoryText out_of_memory_text,
                     Rounds::Freed freed, ServerLossPolicy* losses)
    : context_(context),
      out_of_memory_text_(std::move(out_of_memory_text)),
      rounds_(context, TrackOf(context), std::move(freed), this, losses),
      thread_([this, number] {
        NameThisThread("engine", number);
        Run();
      }) {}

SumThread::~SumThread() {
  queue_.Close();
  // The wait is ended by the close of the queue; deadline: none.
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
  const auto work = [this, rank, reason]()
                        PS_REQUIRES(mu_) { rounds_.losses()->OnWorkerGone(rank, reason); };
  Call(work, true);
}

void SumThread::FailAll(std::shared_ptr<const DeclaredTensor> tensor, const std::string& reason) {
  const auto work = [this, tensor, reason]()
                        PS_REQUIRES(mu_) { rounds_.FailAll(tensor.get(), reason); };
  Call(work, true);
}

void SumThread::Release(std::shared_ptr<const DeclaredTensor> tensor, int rank) {
  Call([this, tensor, rank]() PS_REQUIRES(mu_) { rounds_.Release(tensor.get(), rank); }, true);
}

void SumThread::Free(std::vector<std::shared_ptr<Partition>> partitions) {
  Call([this, partitions]() PS_REQUIRES(mu_) { rounds_.Free(partitions); }, true);
}

void SumThread::Call(std::function<void()> work, bool may_be_repeated) {
  Task task;
  task.work = std::move(work);
  task.may_be_repeated = may_be_repeated;
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
      // Queued requests may complete late rounds, so they are served first.
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
      // A busy thread is never idle, so it checks for late rounds with every task.
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
    try {
      Queue(Task());
    } catch (const std::bad_alloc&) {
      // The thread checks again after the next request that it serves.
      ps::MutexLock lock(&mu_);
      looks_at_ = kNever;
    }
  }
  return true;
}

void SumThread::Do(Task* task) noexcept {
  const auto work = [&]() PS_REQUIRES(mu_) {
    if (task->partition) return HandleRequest(task);
    if (task->work) task->work();
  };
  reserve_.Survive(work, [&](const std::exception& e) PS_REQUIRES(mu_) { OnFailure(task, e); });
}

void SumThread::ServeHeld(Partition* partition) {
  const std::shared_ptr<Partition> stays = partition->shared_from_this();
  while (!partition->is_held && !partition->held.empty()) {
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
  if (partition->is_held) {
    PS_PROBE(kHeldForBackup);
    partition->held.emplace_back(std::move(task->message), task->received);
    return;
  }
  if (partition->is_freed) {
    return context_->Refuse(task->message,
                            "'" + partition->declaration().name + "' was released by all members");
  }
  switch (task->message.op) {
    case kPushPull:
    case kPushStep:
    case kPushNorm:
    case kPushTry:
      return rounds_.Push(partition, &task->message, task->received);
    case kStep:
      return ServeStep(context_, &rounds_, partition, task->message, task->received);
    case kLoadState:
    case kReadState:
      if (MovesFeedback(task->message.op, partition->declaration())) {
        return MoveFeedback(context_, partition, task->message, task->received);
      }
      return MoveState(context_, &rounds_, partition, task->message, task->received);
    default:
      return rounds_.losses()->Serve(partition, &task->message);
  }
}

void SumThread::OnFailure(Task* task, const std::exception& error) {
  const auto* const no_memory = dynamic_cast<const std::bad_alloc*>(&error);
  if (task->partition && no_memory != nullptr) {
    const std::string reason = out_of_memory_text_(task->message, *no_memory);
    BPS_LOG(ERROR) << reason;
    return rounds_.FailRoundOf(task->partition.get(), task->message, reason);
  }
  if (task->partition) {
    return rounds_.FailPartition(task->partition.get(), task->message, error.what());
  }
  if (no_memory != nullptr && task->may_be_repeated) return task->work();
  // The task names no partition, so this thread cannot fail a round. Rounds that need the task fail
  // at their deadline.
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
                   << " could not fail late rounds: " << e.what() << "; " << DescribeFreeMemory();
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
