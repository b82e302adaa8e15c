#include "byteps/recovery/server/absent_members.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "byteps/base/invariant.h"
#include "byteps/recovery/server/notes.h"

namespace byteps {
namespace core {

std::vector<int> AbsentMembers::Set(const std::set<int>& ranks) {
  std::vector<int> lost;
  std::set_difference(ranks.begin(), ranks.end(), ranks_.begin(), ranks_.end(),
                      std::back_inserter(lost));
  ranks_ = ranks;
  return lost;
}

bool AbsentMembers::Refuse(const Partition& partition, const Message& message) const {
  if (!Has(message.peer)) return false;
  PS_PROBE(kPushOfAbsent);
  const std::string did = message.op == kLoadState
                              ? "loaded state"
                              : "pushed round " + std::to_string(HeaderOf(message).round);
  context_->Refuse(message, "worker " + std::to_string(message.peer) + " " + did + " of '" +
                                partition.declaration().name +
                                "', but its replica was removed from the job");
  return true;
}

void AbsentMembers::OnBegin(const Partition& partition, Round* round) const {
  for (const int rank : ranks_) {
    const int member = partition.declaration().MemberIndex(rank);
    if (member < 0) continue;
    round->told[member] = true;
    std::vector<bool>& excused = NotesOf(round)->excused;
    excused.resize(round->pushed.size());
    excused[member] = true;
  }
}

void AbsentMembers::ExcuseAll(Partition* partition, Round* round) const {
  for (const int rank : ranks_) Excuse(partition, round, rank);
}

void AbsentMembers::Excuse(Partition* partition, Round* round, int rank) const {
  const int member = partition->declaration().MemberIndex(rank);
  if (member < 0) return;
  std::erase_if(round->callers, [rank](const Caller& caller) { return caller.rank == rank; });
  round->told[member] = true;
  if (!round->pushed[member]) {
    std::vector<bool>& excused = NotesOf(round)->excused;
    excused.resize(round->pushed.size());
    excused[member] = true;
  }
  if (!round->done) return PS_PROBE(kRoundLosesMember);
  if (round->all_told() && !round->update) rounds_->Clear(round);  // see Rounds::Deliver
}

void AbsentMembers::CloseShort(Partition* partition, Round* round) const {
  const auto& pushed = round->pushed;
  if (std::find(pushed.begin(), pushed.end(), true) == pushed.end()) {
    const std::string& name = partition->declaration().name;
    return rounds_->Fail(partition, round, "no member of '" + name + "' is there");
  }
  PS_PROBE(kRoundShort);
  context_->counters.short_sums.Add();
  rounds_->EndShort(partition, round);
}

bool AbsentMembers::HasAll(const Round& round) {
  const RoundNotes* const notes = FindNotes(round);
  for (size_t i = 0; i < round.pushed.size(); ++i) {
    const bool is_excused = notes != nullptr && !notes->excused.empty() && notes->excused[i];
    if (!round.pushed[i] && !is_excused) return false;
  }
  return true;
}

}  // namespace core
}  // namespace byteps
