#include "byteps/recovery/server/resumed_rounds.h"

#include <string>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/recovery/server/notes.h"
#include "byteps/server/updates.h"

namespace byteps {
namespace core {

void ResumedRounds::GoOnFrom(const DeclaredTensor* tensor, uint32_t first_round) {
  for (Partition* partition : rounds_->partitions()) {
    if (partition->tensor.get() != tensor) continue;
    while (partition->first_round < first_round) {
      if (!partition->rounds.empty()) {
        Round* const round = &partition->rounds.front();
        if (!round->done) rounds_->Fail(partition, round, "all members have ended it");
        rounds_->Clear(round);
        partition->rounds.pop_front();
      }
      ++partition->first_round;
      if (partition->rounds.empty()) partition->first_round = first_round;
    }
  }
}

bool ResumedRounds::Answers(Partition* partition, const Message& push, int64_t received) {
  Round* const round = partition->Find(HeaderOf(push).round);
  const RoundNotes* const notes = round == nullptr ? nullptr : FindNotes(*round);
  if (notes == nullptr || !notes->is_resumed) return false;
  const int rank = push.peer;
  if (round->told[partition->declaration().MemberIndex(rank)] || absent_->Has(rank)) return false;
  round->update ? PS_PROBE(kAnsweredAgain) : PS_PROBE(kPushOfGiven);
  if (round->update && !round->update->IsLike(push.op, StepOf(push))) {
    context_->Refuse(push, "worker " + std::to_string(rank) + " asks for another step of '" +
                               partition->declaration().name +
                               "' than the others did before a server was lost");
    return true;
  }
  Caller caller = CallerOf(push, received);
  if (push.op == kPushNorm) caller.bytes = sizeof(GradientSums);
  round->callers.push_back(caller);
  rounds_->Deliver(partition, round);
  rounds_->DropDone(partition);
  return true;
}

void ResumedRounds::Resume(Round* round, size_t members, std::vector<bool> lacks) {
  round->pushed.assign(members, true);
  round->told.resize(members);
  for (size_t i = 0; i < lacks.size(); ++i) {
    if (lacks[i]) round->told[i] = true;
  }
  RoundNotes* const notes = NotesOf(round);
  notes->excused = std::move(lacks);
  notes->is_resumed = true;
}

void ResumedRounds::Restore(Partition* partition, UpdatedRound last) {
  const Declaration& declaration = partition->declaration();
  Round round;
  round.number = partition->first_round = last.number;
  Resume(&round, declaration.group.size(), std::move(last.excused));
  round.update = std::move(last.update);
  const std::string error = round.update->Restore(last.sum);
  if (!error.empty()) BPS_LOG(ERROR) << "'" << declaration.name << "': " << error;
  round.accumulator.sum() = std::move(last.sum);
  round.done = true;
  partition->rounds.push_back(std::move(round));
}

}  // namespace core
}  // namespace byteps
