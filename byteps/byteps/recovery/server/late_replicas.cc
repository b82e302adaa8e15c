#include "byteps/recovery/server/late_replicas.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/recovery/server/notes.h"

namespace byteps {
namespace core {

namespace {

// Part of the grace period after which awaited members get a message; at least kFirstWord. An
// earlier message would go to the last member of every sum, and to members that skip steps together
// with others.
constexpr int kFirstWordPart = 20;
constexpr auto kFirstWord = std::chrono::milliseconds(50);
// Time for the scheduler and all servers to remove a replica. After it the replica is not removed.
// It is shorter than the time that workers wait for an explanation.
constexpr auto kRemovalTime = std::chrono::seconds(3);
// Time in which another sum may get the late replica removed first.
constexpr auto kOthersFirst = std::chrono::seconds(1);

bool IsExcused(const Round& round, size_t member) {
  const RoundNotes* const notes = FindNotes(round);
  return notes != nullptr && !notes->excused.empty() && notes->excused[member];
}

bool HasCome(const Partition& partition, size_t member) {
  const auto* const notes = static_cast<const PartitionNotes*>(partition.notes.get());
  return notes != nullptr && !notes->came.empty() && notes->came[member];
}

double Seconds(Round::Clock::duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

LateReplicas::Standing LateReplicas::StandingOf(const Partition& partition,
                                                const Round& round) const {
  const Declaration& declaration = partition.declaration();
  Standing standing;
  uint32_t last = UINT32_MAX;
  for (size_t i = 0; i < declaration.group.size(); ++i) {
    const uint32_t replica = declaration.group[i] / declaration.patience.replica_ranks;
    if (replica != last) ++standing.replicas;
    last = replica;
    if (IsExcused(round, i)) continue;
    (round.pushed[i] ? standing.pushed : standing.late).insert(replica);
    if (!round.pushed[i] && !HasCome(partition, i)) standing.anew = true;
  }
  for (const uint32_t replica : standing.late) standing.pushed.erase(replica);
  return standing;
}

void LateReplicas::OnPush(Partition* partition, int rank) {
  const Declaration& declaration = partition->declaration();
  if (declaration.patience.quorum == 0) return;
  std::vector<bool>& came = NotesOf(partition)->came;
  came.resize(declaration.group.size());
  came[declaration.MemberIndex(rank)] = true;
}

void LateReplicas::OnLost(Partition* partition, int rank) {
  if (!partition->notes) return;
  std::vector<bool>& came = NotesOf(partition)->came;
  if (!came.empty()) came[partition->declaration().MemberIndex(rank)] = false;
}

void LateReplicas::BeginGrace(Partition* partition, Round* round) {
  const Declaration& declaration = partition->declaration();
  const Patience& patience = declaration.patience;
  if (patience.quorum == 0) return;
  RoundNotes* const notes = NotesOf(round);
  if (notes->waits != RoundNotes::Waits::kFirst) return;
  // A replica's first step takes longer, because the replica compiles and allocates.
  const Standing standing = StandingOf(*partition, *round);
  if (standing.anew || standing.pushed.size() < patience.quorum) return;
  notes->waits = RoundNotes::Waits::kQuorum;
  notes->quorum_since = Round::Clock::now();
  const std::chrono::milliseconds grace(patience.grace_ms);
  const auto word = std::min(grace, std::max(kFirstWord, grace / kFirstWordPart));
  rounds_->Postpone(partition, round, notes->quorum_since + word);
}

bool LateReplicas::AreExcused(Partition* partition, Round* round, Round::Clock::time_point as_of) {
  RoundNotes* const notes = NotesOf(round);
  if (notes->waits == RoundNotes::Waits::kLate) return false;
  const Patience& patience = partition->declaration().patience;
  const auto last = vacancies_->Last(as_of);
  notes->excused_until = std::max(notes->excused_until, last);
  if (notes->waits == RoundNotes::Waits::kQuorum && last < as_of)
    return false;  // awaited members must first get a message
  const bool graced = notes->waits != RoundNotes::Waits::kFirst && patience.quorum > 0;
  const auto limit = graced ? std::chrono::milliseconds(patience.grace_ms)
                            : std::chrono::milliseconds(std::lround(round->timeout_s * 1e3));
  const auto until = notes->excused_until + limit;
  if (until <= as_of) return false;
  PS_PROBE(kLateExcused);
  rounds_->Postpone(partition, round, until);
  return true;
}

bool LateReplicas::WaitOn(Partition* partition, Round* round, Round::Clock::time_point as_of) {
  const Declaration& declaration = partition->declaration();
  const Patience& patience = declaration.patience;
  if (patience.replica_ranks == 0) return false;
  RoundNotes* const notes = NotesOf(round);
  switch (notes->waits) {
    case RoundNotes::Waits::kQuorum:
      notes->waits = RoundNotes::Waits::kAwaited;
      if (partition->index == 0) {
        PS_PROBE(kReplicaAwaited);
        for (size_t i = 0; i < declaration.group.size(); ++i) {
          if (round->pushed[i] || IsExcused(*round, i)) continue;
          context_->channel->SayAwaited(declaration.group[i], declaration.name, round->number);
        }
      }
      rounds_->Postpone(partition, round,
                        std::max(notes->quorum_since, notes->excused_until) +
                            std::chrono::milliseconds(patience.grace_ms));
      return true;
    case RoundNotes::Waits::kFirst:
    case RoundNotes::Waits::kAwaited: {
      const Standing standing = StandingOf(*partition, *round);
      // Without a quorum, replicas that have pushed accuse the late ones only if the late ones are
      // not more.
      const size_t enough = patience.quorum > 0 ? patience.quorum : standing.late.size();
      const bool accuses = standing.pushed.size() >= enough;
      if (accuses && standing.replicas == 2) break;
      // A late replica may itself wait for another late replica. In a sum that both take part in, a
      // server then accuses that other replica.
      notes->waits = accuses ? RoundNotes::Waits::kSeveral : RoundNotes::Waits::kLate;
      rounds_->Postpone(partition, round, as_of + (accuses ? kOthersFirst : kRemovalTime));
      return true;
    }
    case RoundNotes::Waits::kSeveral:
      break;
    case RoundNotes::Waits::kLate:
      return false;
  }
  PS_PROBE(kReplicaLate);
  notes->waits = RoundNotes::Waits::kLate;
  Accuse(*partition, *round, as_of);
  rounds_->Postpone(partition, round, as_of + kRemovalTime);
  return true;
}

void LateReplicas::Accuse(const Partition& partition, const Round& round,
                          Round::Clock::time_point as_of) {
  const Declaration& declaration = partition.declaration();
  const Patience& patience = declaration.patience;
  const RoundNotes& notes = *FindNotes(round);
  const bool graced = notes.quorum_since != Round::Clock::time_point();
  for (const uint32_t replica : StandingOf(partition, round).late) {
    if (!accused_.insert(replica).second) continue;
    char why[160];
    if (graced) {
      snprintf(why, sizeof(why), "%.1f s after %u replicas (%s)",
               Seconds(as_of - notes.quorum_since), patience.quorum, patience.Describe().c_str());
    } else {
      snprintf(why, sizeof(why), "for %.1f s, while others waited (BYTEPS_OP_TIMEOUT_S=%g)",
               Seconds(as_of - round.started), round.timeout_s);
    }
    const int rank = static_cast<int>(replica * patience.replica_ranks);
    context_->channel->SayLate(rank, "it had not pushed '" + declaration.name + "' " + why);
  }
}

}  // namespace core
}  // namespace byteps
