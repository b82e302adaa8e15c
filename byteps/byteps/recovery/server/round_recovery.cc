#include "byteps/recovery/server/round_recovery.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/recovery/server/notes.h"
#include "byteps/server/rounds.h"
#include "byteps/server/sum_thread.h"

namespace byteps {
namespace core {

namespace {

// Interval of checks whether the scheduler has returned or the backup was lost.
constexpr auto kLookAgain = std::chrono::seconds(1);

}  // namespace

RoundRecovery::RoundRecovery(ServerContext* context, Rounds* rounds, SumThread* thread,
                             Confirmations* confirmations, const Vacancies* vacancies,
                             BackupLink* backup)
    : RoundLossPolicy(context, rounds, thread),
      confirmations_(confirmations),
      absent_(context, rounds),
      late_(context, rounds, vacancies),
      resumed_(context, rounds, &absent_),
      given_(context, rounds, confirmations, &absent_),
      copied_(context, rounds, thread, this, &absent_, backup) {}

// ------------------------------------------------------------------ on the path of requests

bool RoundRecovery::Refuses(const Partition& partition, const Message& message) {
  return absent_.Refuse(partition, message);
}

bool RoundRecovery::Answers(Partition* partition, const Message& push, int64_t received) {
  const PushHeader header = HeaderOf(push);
  if ((header.flags & PushHeader::kKeepsSums) != 0) {
    confirmations_->Confirm(push.peer, header.confirmed);
  }
  return resumed_.Answers(partition, push, received);
}

void RoundRecovery::OnBegin(const Partition& partition, Round* round) {
  absent_.OnBegin(partition, round);
}

void RoundRecovery::OnAdded(Partition* partition, Round* round, const Message& push) {
  late_.OnPush(partition, push.peer);
  if (round->callers.back().keeps) {
    uint32_t& ended = NotesOf(round)->ended;
    ended = std::min(ended, HeaderOf(push).oldest);
  }
  if (round->accumulator.added() == round->pushed.size()) return;
  const RoundNotes* const notes = FindNotes(*round);
  const bool may_end = notes != nullptr && (!notes->excused.empty() || notes->parts_had > 0);
  may_end ? EndIfAll(partition, round) : late_.BeginGrace(partition, round);
}

void RoundRecovery::EndIfAll(Partition* partition, Round* round) {
  if (!AbsentMembers::HasAll(*round)) return late_.BeginGrace(partition, round);
  if (NotesOf(round)->parts_had == 0) return absent_.CloseShort(partition, round);
  PS_PROBE(kSumNowhere);
  rounds_->Fail(
      partition, round,
      "'" + partition->declaration().name + "', round " + std::to_string(round->number) +
          ": a server was lost that had answered some members, and they asked for parts alone: "
          "its sum is lost");
}

bool RoundRecovery::Holds(Partition* partition, Round* round) {
  return copied_.HoldsRound(partition, round);
}

AnswerNotes RoundRecovery::Describe(Round* round) {
  AnswerNotes answer;
  if (const RoundNotes* notes = FindNotes(*round)) answer.lacks = PackMembers(notes->excused);
  given_.Describe(round, &answer);
  return answer;
}

void RoundRecovery::OnOver(Partition* partition, Round* round) { copied_.OnOver(partition, round); }

bool RoundRecovery::Waits(Partition* partition, Round* round, Round::Clock::time_point as_of) {
  // A held partition waits for the backup. The scheduler watches the backup like every server.
  if (!partition->is_held) {
    if (late_.AreExcused(partition, round, as_of) || late_.WaitOn(partition, round, as_of)) {
      return true;
    }
    // While the scheduler is lost, nobody can report that an accused replica is gone.
    if (!context_->channel->lacks_scheduler()) return false;
  }
  rounds_->Postpone(partition, round, as_of + kLookAgain);
  return true;
}

bool RoundRecovery::HoldsStep(Partition* partition, const Message& message, const std::string& step,
                              int64_t received) {
  return copied_.HoldsStep(partition, message, step, received);
}

bool RoundRecovery::HoldsLoad(Partition* partition, const Message& message, int64_t received) {
  return copied_.HoldsLoad(partition, message, received);
}

void RoundRecovery::Serve(Partition* partition, Message* message) {
  if (message->op != kGiveSum) return RoundLossPolicy::Serve(partition, message);
  Round* const round = given_.Take(partition, message);
  if (round != nullptr && AbsentMembers::HasAll(*round)) EndIfAll(partition, round);
  rounds_->DropDone(partition);
  given_.Acknowledge(partition, *message);
}

void RoundRecovery::OnFreed(Partition* partition) { copied_.OnFreed(partition); }

// ------------------------------------------------------------------ events

void RoundRecovery::SetAbsent(const std::set<int>& ranks) {
  Call([this, ranks] {
    const std::vector<int> lost = absent_.Set(ranks);
    late_.Forget();
    for (Partition* partition : rounds_->partitions()) {
      for (const int rank : lost) {
        if (partition->declaration().MemberIndex(rank) < 0) continue;
        late_.OnLost(partition, rank);
        for (Round& round : partition->rounds) absent_.Excuse(partition, &round, rank);
      }
      EndWithoutAbsent(partition);
    }
  });
}

void RoundRecovery::EndWithoutAbsent(Partition* partition) {
  for (Round& round : partition->rounds) {
    // A held partition may be held for this round. GoOn then calls this function again.
    if (partition->is_held) break;
    const RoundNotes* const notes = FindNotes(round);
    if (round.done || notes == nullptr || notes->excused.empty()) continue;
    if (AbsentMembers::HasAll(round)) EndIfAll(partition, &round);
  }
  rounds_->DropDone(partition);
}

void RoundRecovery::GoOnFrom(std::shared_ptr<const DeclaredTensor> tensor, uint32_t first_round) {
  thread_->Call([this, tensor, first_round] { resumed_.GoOnFrom(tensor.get(), first_round); },
                true);
}

void RoundRecovery::SetBackup(uint64_t token) {
  thread_->Call([this, token] { copied_.SetBackup(token); }, true);
}

void RoundRecovery::OnCopied(std::shared_ptr<Partition> partition, uint64_t number) {
  Call([this, partition, number] { copied_.OnCopied(partition.get(), number); });
}

void RoundRecovery::Adopt(std::shared_ptr<Partition> partition) {
  const auto work = [this, partition] {
    copied_.Adopt(partition.get());
    copied_.CopyNext();
  };
  thread_->Call(work, true);
}

void RoundRecovery::Call(std::function<void()> task) { thread_->Call(std::move(task)); }

}  // namespace core
}  // namespace byteps
