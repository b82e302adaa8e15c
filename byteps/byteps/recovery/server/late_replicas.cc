#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <string>

#include "byteps/base/invariant.h"
#include "byteps/server/rounds.h"

namespace byteps {
namespace core {

// Rounds that wait for replicas that are late (Patience, docs/design/replicas.md).
//
//   first ── quorum ──▶ quorum ── first word ──▶ awaited ── grace ──▶ accused ── 3 s ──▶ fails
//     └───────────────── as long as a sum may take ──────────────────────▶┘
//
// While the place of another server is vacant, or there is no scheduler to say so, nobody is late:
// the grace, or the time that a sum may take, begins anew once that is over.
//
// Those that are late are accused if enough of the others have pushed; kOthersFirst later in a
// group of more than two replicas.

namespace {

// Members that the others wait for are told after this part of the grace, and so long at least: not
// those of every sum, of which each has a last one, nor those that are later than one that has left
// out steps.
constexpr int kFirstWordPart = 20;
constexpr auto kFirstWord = std::chrono::milliseconds(50);
// The scheduler and all servers remove a replica in this time, or it is not removed.  Less than
// workers wait for an explanation.
constexpr auto kRemovalTime = std::chrono::seconds(3);
// In this time another sum may have one that is late removed.
constexpr auto kOthersFirst = std::chrono::seconds(1);

double Seconds(Round::Clock::duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

Rounds::Standing Rounds::StandingOf(const Partition& partition, const Round& round) const {
  const Declaration& declaration = partition.declaration();
  Standing standing;
  uint32_t last = UINT32_MAX;
  for (size_t i = 0; i < declaration.group.size(); ++i) {
    const uint32_t replica = declaration.group[i] / declaration.patience.replica_ranks;
    if (replica != last) ++standing.replicas;
    last = replica;
    if (!round.excused.empty() && round.excused[i]) continue;
    (round.pushed[i] ? standing.pushed : standing.late).insert(replica);
    const bool came = !partition.came.empty() && partition.came[i];
    if (!round.pushed[i] && !came) standing.anew = true;
  }
  for (const uint32_t replica : standing.late) standing.pushed.erase(replica);
  return standing;
}

void Rounds::BeginGrace(Partition* partition, Round* round) {
  const Declaration& declaration = partition->declaration();
  const Patience& patience = declaration.patience;
  if (patience.quorum == 0) return;
  if (round->waits != Round::Waits::kFirst) return;
  // A replica's first step takes longer than others: it compiles, and allocates.
  const Standing standing = StandingOf(*partition, *round);
  if (standing.anew || standing.pushed.size() < patience.quorum) return;
  round->waits = Round::Waits::kQuorum;
  round->quorum_since = Clock::now();
  const std::chrono::milliseconds grace(patience.grace_ms);
  const auto word = std::min(grace, std::max(kFirstWord, grace / kFirstWordPart));
  Postpone(partition, round, round->quorum_since + word);
}

bool Rounds::AreExcused(Partition* partition, Round* round, Clock::time_point as_of) {
  if (round->waits == Round::Waits::kLate) return false;
  const Patience& patience = partition->declaration().patience;
  const auto last = context_->vacancies.Last(as_of);
  round->excused_until = std::max(round->excused_until, last);
  if (round->waits == Round::Waits::kQuorum && last < as_of) return false;  // the word comes first
  const bool graced = round->waits != Round::Waits::kFirst && patience.quorum > 0;
  const auto limit = graced ? std::chrono::milliseconds(patience.grace_ms)
                            : std::chrono::milliseconds(std::lround(round->timeout_s * 1e3));
  const auto until = round->excused_until + limit;
  if (until <= as_of) return false;
  PS_PROBE(kLateExcused);
  Postpone(partition, round, until);
  return true;
}

bool Rounds::WaitOn(Partition* partition, Round* round, Clock::time_point as_of) {
  const Declaration& declaration = partition->declaration();
  const Patience& patience = declaration.patience;
  if (patience.replica_ranks == 0) return false;
  switch (round->waits) {
    case Round::Waits::kQuorum:
      round->waits = Round::Waits::kAwaited;
      if (partition->index == 0) {
        PS_PROBE(kReplicaAwaited);
        for (size_t i = 0; i < declaration.group.size(); ++i) {
          const bool excused = !round->excused.empty() && round->excused[i];
          if (round->pushed[i] || excused) continue;
          context_->channel->SayAwaited(declaration.group[i], declaration.name, round->number);
        }
      }
      Postpone(partition, round,
               std::max(round->quorum_since, round->excused_until) +
                   std::chrono::milliseconds(patience.grace_ms));
      return true;
    case Round::Waits::kFirst:
    case Round::Waits::kAwaited: {
      const Standing standing = StandingOf(*partition, *round);
      // Without a quorum half of those that are there are right, and the others late.
      const size_t enough = patience.quorum > 0 ? patience.quorum : standing.late.size();
      const bool accuses = standing.pushed.size() >= enough;
      if (accuses && standing.replicas == 2) break;
      // One that is late may wait for another one in a sum of these two, which accuses that one.
      round->waits = accuses ? Round::Waits::kSeveral : Round::Waits::kLate;
      Postpone(partition, round, as_of + (accuses ? kOthersFirst : kRemovalTime));
      return true;
    }
    case Round::Waits::kSeveral:
      break;
    case Round::Waits::kLate:
      return false;
  }
  PS_PROBE(kReplicaLate);
  round->waits = Round::Waits::kLate;
  Accuse(*partition, *round, as_of);
  Postpone(partition, round, as_of + kRemovalTime);
  return true;
}

void Rounds::Accuse(const Partition& partition, const Round& round, Clock::time_point as_of) {
  const Declaration& declaration = partition.declaration();
  const Patience& patience = declaration.patience;
  const bool graced = round.quorum_since != Clock::time_point();
  for (const uint32_t replica : StandingOf(partition, round).late) {
    if (!accused_.insert(replica).second) continue;
    char why[160];
    if (graced) {
      snprintf(why, sizeof(why), "%.1f s after %u replicas (%s)",
               Seconds(as_of - round.quorum_since), patience.quorum, patience.Describe().c_str());
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
