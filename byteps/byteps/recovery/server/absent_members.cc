#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/process.h"
#include "byteps/server/rounds.h"

namespace byteps {
namespace core {

// Rounds without the members of replicas that were removed.

void Rounds::SetAbsent(const std::set<int>& ranks) {
  std::vector<int> lost;
  std::set_difference(ranks.begin(), ranks.end(), absent_.begin(), absent_.end(),
                      std::back_inserter(lost));
  absent_ = ranks;
  accused_.clear();
  for (Partition* partition : partitions_) {
    for (const int rank : lost) {
      const int member = partition->declaration().MemberIndex(rank);
      if (member < 0) continue;
      if (!partition->came.empty()) partition->came[member] = false;
      for (Round& round : partition->rounds) Excuse(partition, &round, rank);
    }
    EndWithoutAbsent(partition);
  }
}

void Rounds::EndWithoutAbsent(Partition* partition) {
  for (Round& round : partition->rounds) {
    if (partition->copying) break;  // it may be this round; GoOn looks again
    if (!round.done && !round.excused.empty() && round.has_all()) EndIfAll(partition, &round);
  }
  DropDone(partition);
}

void Rounds::Excuse(Partition* partition, Round* round, int rank) {
  std::erase_if(round->callers, [rank](const Caller& caller) { return caller.rank == rank; });
  round->Excuse(partition->declaration().MemberIndex(rank));
  if (round->done) {
    if (round->all_told() && !round->update) round->accumulator.Clear(&scratch_);  // see Deliver
    return;
  }
  PS_PROBE(kRoundLosesMember);
}

void Rounds::EndIfAll(Partition* partition, Round* round) {
  if (!round->has_all()) return BeginGrace(partition, round);
  if (round->parts_had == 0) return CloseShort(partition, round);
  PS_PROBE(kSumNowhere);
  Fail(partition, round,
       "'" + partition->declaration().name + "', round " + std::to_string(round->number) +
           ": a server was lost that had answered some members, and they asked for parts alone: "
           "its sum is lost");
}

void Rounds::CloseShort(Partition* partition, Round* round) {
  if (std::find(round->pushed.begin(), round->pushed.end(), true) == round->pushed.end()) {
    return Fail(partition, round, "no member of '" + partition->declaration().name + "' is there");
  }
  PS_PROBE(kRoundShort);
  context_->counters.short_sums.Add();
  Chance chance;
  const AdditionRule rule = RuleOf(partition, round, &chance);
  round->accumulator.Close(partition->declaration(), rule, &scratch_);
  round->last_added = SteadyNs();
  EndSummed(partition, round);
}

bool Rounds::RefuseAbsent(Partition* partition, const Message& message, const std::string& did) {
  if (absent_.count(message.peer) == 0) return false;
  PS_PROBE(kPushOfAbsent);
  context_->Refuse(message, "worker " + std::to_string(message.peer) + " " + did + " of '" +
                                partition->declaration().name +
                                "', but its replica was removed from the job");
  return true;
}

}  // namespace core
}  // namespace byteps
