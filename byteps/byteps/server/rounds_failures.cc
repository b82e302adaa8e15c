// How rounds end that have no sum.
#include <algorithm>
#include <cstdio>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/probe.h"
#include "byteps/base/text.h"
#include "byteps/server/rounds.h"

namespace byteps {
namespace core {
namespace {

// Of each partition.
constexpr size_t kFailuresKept = 16;
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
  context_->counters.failed_sums.Add();
  context_->TraceRound(*partition, *round, false);
  for (const Caller& caller : round->callers) {
    const int member = partition->declaration().MemberIndex(caller.rank);
    CheckUntold(*partition, *round, member);
    context_->Answer(caller, partition->key, reason);
    round->told[member] = true;
  }
  round->failure = reason;
  round->callers.clear();
  round->accumulator.Clear(&scratch_);
  round->done = true;
  Close(*partition, *round);
}

void Rounds::GiveUpBefore(Partition* partition, int rank, uint32_t number) {
  if (number <= partition->first_round) return;
  const int member = partition->declaration().MemberIndex(rank);
  const size_t ahead = number - partition->first_round;
  for (size_t i = 0; i < std::min(ahead, partition->rounds.size()); ++i) {
    Round* const round = &partition->rounds[i];
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
  for (Partition* partition : partitions_) {
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

void Rounds::FailAll(const DeclaredTensor* tensor, const std::string& reason) {
  for (Partition* partition : partitions_) {
    if (partition->tensor != tensor) continue;
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
    // Its backup is watched as each server is.
    if (partition->copying) {
      Postpone(partition, round, as_of + kLookAgain);
      continue;
    }
    if (WaitOn(partition, round, as_of)) continue;
    // Who is late may be gone, and nobody is there to say so.
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
  for (Round& round : partition->rounds) {
    // One that has its sum may have been told to some of its members.
    std::erase_if(round.callers, [&](const Caller& caller) {
      return round.told[declaration.MemberIndex(caller.rank)];
    });
    const bool is_open = open_.count(DeadlineOf(*partition, round)) > 0;
    if (is_open || !round.callers.empty()) Fail(partition, &round, error);
  }
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
  // It was being answered: to those who had their answers no other one may come.
  if (round->done) return;
  const bool waits = std::any_of(
      round->callers.begin(), round->callers.end(),
      [&](const Caller& c) { return c.rank == message.peer && c.request == message.number; });
  Fail(partition, round, reason);
  round->told[partition->declaration().MemberIndex(message.peer)] = true;
  if (!waits) context_->Refuse(message, reason);
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
      partition->ended =
          UpdatedRound{round.number, std::move(round.update), std::move(round.accumulator.sum())};
    }
    round.accumulator.Clear(&scratch_);
    partition->rounds.pop_front();
    ++partition->first_round;
  }
}

}  // namespace core
}  // namespace byteps
