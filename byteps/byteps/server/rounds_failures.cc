// Rounds that miss something: they fail, go on without members that are gone, or end by sums that
// members have.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/process.h"
#include "byteps/base/wire.h"
#include "byteps/server/rounds.h"

namespace byteps {
namespace core {

// How rounds end that have no sum.

namespace {

// Of each partition.
constexpr size_t kFailuresKept = 16;
// Failure of a round that has its sum and is still open.
constexpr char kNoMemoryToAnswer[] =
    "the server is out of memory: it has the sum, and could not send it";
// Whether there is a scheduler again.
constexpr auto kLookAgain = std::chrono::seconds(1);

std::string MissingRanks(const Partition& partition, const Round& round) {
  const auto& group = partition.declaration().group;
  std::string missing;
  for (size_t i = 0; i < group.size(); ++i) {
    if (round.pushed[i]) continue;
    missing += (missing.empty() ? "worker " : ", worker ") + std::to_string(group[i]);
  }
  return missing;
}

std::string WaitedFor(const std::string& reason, const Declaration& declaration) {
  return reason + " while the push_pull of '" + declaration.name + "' waited for it";
}

}  // namespace

void Rounds::Fail(Partition* partition, Round* round, const std::string& reason) {
  // The caller calls again if there is no memory for all of this.
  round->failure = reason;
  context_->TraceRound(*partition, *round, false);
  round->AnswerCallers([&](const Caller& caller) {
    const int member = partition->declaration().MemberIndex(caller.rank);
    CheckUntold(*partition, *round, member);
    context_->Answer(caller, partition->key, reason);
    round->told[member] = true;
  });
  context_->counters.failed_sums.Add();
  round->accumulator.Clear(&scratch_);
  round->done = true;
  Close(*partition, *round);
}

void Rounds::FailUnanswered(Partition* partition, Round* round, const std::string& reason) {
  const bool is_open = open_.count(DeadlineOf(*partition, *round)) > 0;
  if (is_open && (!round->done || !round->callers.empty())) return Fail(partition, round, reason);
  if (is_open) Close(*partition, *round);
  round->AnswerCallers(
      [&](const Caller& caller) { context_->Answer(caller, partition->key, reason); });
}

void Rounds::GiveUpBefore(Partition* partition, int rank, uint32_t number) {
  if (number <= partition->first_round) return;
  const int member = partition->declaration().MemberIndex(rank);
  const size_t ahead = number - partition->first_round;
  for (size_t i = 0; i < std::min(ahead, partition->rounds.size()); ++i) {
    Round* const round = &partition->rounds[i];
    if (round->done && open_.count(DeadlineOf(*partition, *round)) > 0) {
      FailUnanswered(partition, round, kNoMemoryToAnswer);
    }
    if (round->told[member]) continue;
    if (!round->done) {
      PS_PROBE(kRoundGivenUp);
      Fail(partition, round,
           "worker " + std::to_string(rank) + " gave up round " + std::to_string(round->number) +
               " of '" + partition->declaration().name +
               "', in which something of it failed, and went on");
    }
    round->pushed[member] = round->told[member] = true;
  }
}

void Rounds::FailWithoutThoseGone(Partition* partition, Round* round) {
  const Declaration& declaration = partition->declaration();
  for (const auto& [rank, reason] : gone_) {
    const int lost = declaration.MemberIndex(rank);
    if (round->done || lost < 0 || round->pushed[lost]) continue;
    PS_PROBE(kRoundAfterLost);
    Fail(partition, round, WaitedFor(reason, declaration));
  }
}

void Rounds::FailWithout(int rank, const std::string& reason) {
  gone_[rank] = reason;
  // Thousands of workers may leave at once, and few partitions have open rounds then.
  std::map<uint64_t, Partition*> waiting;
  for (const auto& [deadline, partition] : open_) waiting[partition->key] = partition;
  for (const auto& [key, partition] : waiting) {
    const Declaration& declaration = partition->declaration();
    const int member = declaration.MemberIndex(rank);
    if (member < 0) continue;
    for (auto& round : partition->rounds) {
      if (round.done || round.pushed[member]) continue;
      PS_PROBE(kRoundOfLost);
      Fail(partition, &round, WaitedFor(reason, declaration));
    }
    DropDone(partition);
  }
}

// Tensors that members release.

bool Rounds::RefuseReleased(const Partition& partition, const Message& message) {
  const int rank = partition.tensor->released_by;
  if (rank < 0) return false;
  PS_PROBE(kPushAfterRelease);
  context_->Refuse(message, "worker " + std::to_string(rank) + " has released '" +
                                partition.declaration().name + "', which worker " +
                                std::to_string(message.peer) +
                                " pushed: all members release it after the same sums");
  return true;
}

void Rounds::Release(const DeclaredTensor* tensor, int rank) {
  for (Partition* partition : partitions_) {
    if (partition->tensor.get() != tensor) continue;
    if (partition->copying) {
      partition->released_by.push_back(rank);  // GoOn looks again
    } else {
      Release(partition, rank);
    }
  }
}

void Rounds::Release(Partition* partition, int rank) {
  const int member = partition->declaration().MemberIndex(rank);
  for (Round& round : partition->rounds) {
    if (round.told[member]) continue;
    if (!round.done) {
      PS_PROBE(kRoundOfReleased);
      Fail(partition, &round,
           "worker " + std::to_string(rank) + " has released '" + partition->declaration().name +
               "', of which it had not ended round " + std::to_string(round.number));
    }
    round.pushed[member] = round.told[member] = true;
  }
  DropDone(partition);
}

void Rounds::Free(const std::vector<std::shared_ptr<Partition>>& partitions) {
  for (const auto& partition : partitions) {
    partition->is_freed = true;
    if (partition->copying) {
      PS_PROBE(kFreedLater);
      continue;  // GoOn looks again
    }
    EndFreed(partition.get());
  }
  const auto is_over = [](const Partition* p) { return p->is_freed && !p->copying; };
  std::erase_if(partitions_, is_over);
  std::erase_if(states_, is_over);
  for (const auto& partition : partitions) {
    if (!partition->copying) freed_(*partition);
  }
}

void Rounds::EndFreed(Partition* partition) {
  const std::string reason = "all members have released '" + partition->declaration().name + "'";
  for (Round& round : partition->rounds) {
    if (!round.done) Fail(partition, &round, reason);
    round.accumulator.Clear(&scratch_);
  }
  partition->rounds.clear();
  partition->ended.reset();
  partition->lost = {};
  if (HasCopy(*partition)) TellFreed(*partition);
  partition->state.reset();
}

void Rounds::FailAll(const DeclaredTensor* tensor, const std::string& reason) {
  for (Partition* partition : partitions_) {
    if (partition->tensor.get() != tensor) continue;
    for (auto& round : partition->rounds) {
      if (!round.done) Fail(partition, &round, reason);
    }
    DropDone(partition);
  }
}

void Rounds::FailLate(Clock::time_point as_of, Clock::time_point grace_until,
                      Clock::duration stood_still) {
  while (!open_.empty()) {
    const auto& [deadline, key, number] = open_.begin()->first;
    if (as_of < deadline) return;
    Partition* const partition = open_.begin()->second;
    const Declaration& declaration = partition->declaration();
    Round* const round = partition->Find(number);
    if (round->done) {
      FailUnanswered(partition, round, kNoMemoryToAnswer);
      DropDone(partition);
      continue;
    }
    // Its backup is watched as each server is.
    if (partition->copying) {
      Postpone(partition, round, as_of + kLookAgain);
      continue;
    }
    if (AreExcused(partition, round, as_of) || WaitOn(partition, round, as_of)) continue;
    // Who was accused may be gone, and nobody is there to say so.
    if (context_->channel->lacks_scheduler()) {
      Postpone(partition, round, as_of + kLookAgain);
      continue;
    }
    PS_PROBE(kRoundLate);
    char limit[96];
    snprintf(limit, sizeof(limit), "%.1f s (BYTEPS_OP_TIMEOUT_S=%g)",
             std::chrono::duration<double>(as_of - round->started).count(), round->timeout_s);
    std::string pause;
    if (round->started < grace_until) {
      pause = "; this server stood still for " +
              Seconds(std::chrono::duration<double>(stood_still).count()) + " meanwhile";
    }
    Fail(partition, round,
         "push_pull of '" + declaration.name + "' timed out: partition " +
             std::to_string(partition->index) + ", key " + Hex(partition->key) + ", " +
             std::to_string(declaration.PartitionSize(partition->index)) +
             " bytes, still lacks the push of " + MissingRanks(*partition, *round) + " after " +
             limit + pause);
    DropDone(partition);
  }
}

void Rounds::FailPartition(Partition* partition, const Message& message, const std::string& error) {
  const Declaration& declaration = partition->declaration();
  BPS_LOG(ERROR) << "serving partition " << partition->index << " of '" << declaration.name
                 << "' failed: " << error;
  for (Round& round : partition->rounds) FailUnanswered(partition, &round, error);
  // Members that waited in its round were answered by that, unless the request never got so far.
  Round* const round = partition->Find(HeaderOf(message).round);
  const int member = declaration.MemberIndex(message.peer);
  if (round == nullptr) {
    context_->Refuse(message, error);
  } else if (!round->told[member]) {
    round->pushed[member] = round->told[member] = true;
    context_->Refuse(message, error);
  }
  DropDone(partition);
}

void Rounds::FailRoundOf(Partition* partition, const Message& message, const std::string& reason) {
  const int op = message.op;
  const bool is_push = op != kLoadState && op != kReadState && op != kStep;
  Round* const round = partition->Find(HeaderOf(message).round);
  if (!is_push || round == nullptr) return context_->Refuse(message, reason);
  // One that was done was being answered: to those who had their answers no other one may come.
  const int member = partition->declaration().MemberIndex(message.peer);
  const bool waits = std::any_of(
      round->callers.begin(), round->callers.end(),
      [&](const Caller& c) { return c.rank == message.peer && c.request == message.number; });
  if (!round->done && !waits && !round->told[member]) {
    context_->Refuse(message, reason);
    round->told[member] = true;
  }
  FailUnanswered(partition, round, reason);
  DropDone(partition);
}

void Rounds::DropDone(Partition* partition) {
  // A round stays until every member has its sum.  Of one that failed the reason is enough.
  while (!partition->rounds.empty()) {
    Round& round = partition->rounds.front();
    if (!round.done || (round.failure.empty() && !round.all_told())) return;
    if (!round.failure.empty() && !round.all_told()) {
      partition->failures[round.number] = std::move(round.failure);
      if (partition->failures.size() > kFailuresKept) {
        partition->failures.erase(partition->failures.begin());
      }
    } else if (round.update && round.update->pushed_by() != 0 && context_->backup != nullptr) {
      partition->ended = UpdatedRound{round.number, std::move(round.update),
                                      std::move(round.accumulator.sum()), std::move(round.excused)};
    }
    round.accumulator.Clear(&scratch_);
    partition->rounds.pop_front();
    ++partition->first_round;
  }
}

}  // namespace core
}  // namespace byteps
