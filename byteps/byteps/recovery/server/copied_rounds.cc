#include "byteps/recovery/server/copied_rounds.h"

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/memory_reserve.h"
#include "byteps/base/wire.h"
#include "byteps/recovery/server/copies.h"
#include "byteps/recovery/server/round_recovery.h"
#include "byteps/server/sum_thread.h"
#include "byteps/server/updates.h"

namespace byteps {
namespace core {

// ------------------------------------------------------------------ records to the backup

bool CopiedRounds::HasCopy(const Partition& partition) const {
  const auto* const notes = static_cast<const PartitionNotes*>(partition.notes.get());
  return token_ != 0 && notes != nullptr && notes->token == token_;
}

LastRound CopiedRounds::LastOf(Partition* partition) {
  for (auto it = partition->rounds.rbegin(); it != partition->rounds.rend(); ++it) {
    const bool has_update = it->done && it->failure.empty() && it->update->pushed_by() != 0;
    if (!has_update) continue;
    const RoundNotes* const notes = FindNotes(*it);
    return {it->number, it->update.get(), it->accumulator.sum(),
            notes == nullptr ? std::vector<bool>() : notes->excused};
  }
  if (!NotesOf(partition)->ended) return {};
  const UpdatedRound& ended = *NotesOf(partition)->ended;
  return {ended.number, ended.update.get(), ended.sum, ended.excused};
}

RoundUpdate* CopiedRounds::LastUpdate(Partition* partition) {
  for (auto it = partition->rounds.rbegin(); it != partition->rounds.rend(); ++it) {
    if (it->done && it->update->pushed_by() != 0) return it->update.get();
  }
  const auto& ended = NotesOf(partition)->ended;
  return ended ? ended->update.get() : nullptr;
}

void CopiedRounds::Tell(Partition* partition, Copying&& what, CopyRecord record,
                        SharedBytes values) {
  PartitionNotes* const notes = NotesOf(partition);
  record.token = token_;
  // Decisions and whole states already include the outcome of the last step.
  RoundUpdate* const last = record.settled.empty() ? LastUpdate(partition) : nullptr;
  if (last != nullptr && !record.is_all) record.settled = last->Settled();
  what.number = backup_->Tell(partition->key, record, std::move(values));
  notes->copying = std::move(what);
  partition->is_held = true;
  if (last != nullptr) last->NoteTold();
}

void CopiedRounds::TellAll(Partition* partition, Copying&& what) {
  PS_PROBE(kStateCopied);
  SharedBytes values;
  CopyRecord record =
      RecordOfAll(partition->declaration(), *partition->state, LastOf(partition), &values);
  Tell(partition, std::move(what), std::move(record), std::move(values));
  NotesOf(partition)->token = token_;
}

void CopiedRounds::TellFreed(const Partition& partition) {
  CopyRecord record;
  record.token = token_;
  record.what = CopyRecord::kFreed;
  backup_->Tell(partition.key, record, {});
}

bool CopiedRounds::HoldsRound(Partition* partition, Round* round) {
  if (!HasCopy(*partition)) return false;
  PS_PROBE(kRoundCopied);
  const RoundUpdate& update = *round->update;
  CopyRecord record;
  record.what = CopyRecord::kRound;
  record.round = round->number;
  record.op = static_cast<uint8_t>(update.op());
  record.step = update.step();
  record.rank = static_cast<uint32_t>(update.asked_by());
  if (const RoundNotes* notes = FindNotes(*round)) record.lacks = PackMembers(notes->excused);
  Copying what;
  what.round = round->number;
  Tell(partition, std::move(what), std::move(record), round->accumulator.sum());
  return true;
}

bool CopiedRounds::HoldsStep(Partition* partition, const Message& message, const std::string& step,
                             int64_t received) {
  if (!HasCopy(*partition)) return false;
  const bool is_verdict = message.op == kReadState;
  is_verdict ? PS_PROBE(kVerdictCopied) : PS_PROBE(kStepCopied);
  CopyRecord record;
  record.settled = step;
  record.round = HeaderOf(message).round;
  record.rank = static_cast<uint32_t>(message.peer);
  Copying what;
  what.kind = is_verdict ? Copying::kVerdict : Copying::kStep;
  what.request = message;
  what.received = received;
  Tell(partition, std::move(what), std::move(record), {});
  return true;
}

bool CopiedRounds::HoldsLoad(Partition* partition, const Message& message, int64_t received) {
  if (backup_ == nullptr) return false;
  Adopt(partition);
  if (token_ == 0) {
    backup_->HasState();
    return false;
  }
  PS_PROBE(kLoadCopied);
  Copying what;
  what.kind = Copying::kLoad;
  what.request = message;
  what.request.values = SharedBytes();
  what.received = received;
  if (!HasCopy(*partition)) {
    TellAll(partition, std::move(what));
    return true;
  }
  CopyRecord record;
  record.what = CopyRecord::kState;
  record.declaration = PackDeclarations({partition->declaration()});
  const std::string slot = StepOf(message);
  record.slots = 1U << WireReader(slot).Get<uint32_t>();
  Tell(partition, std::move(what), std::move(record), message.values);
  return true;
}

void CopiedRounds::Adopt(Partition* partition) {
  if (backup_ == nullptr || NotesOf(partition)->has_state) return;
  rounds_->List(partition);
  states_.push_back(partition);
  NotesOf(partition)->has_state = true;
  for (Round& round : partition->rounds) absent_->ExcuseAll(partition, &round);
  rounds_->DropDone(partition);
}

void CopiedRounds::OnOver(Partition* partition, Round* round) {
  if (backup_ == nullptr || !round->update || round->update->pushed_by() == 0) return;
  std::vector<bool> lacks;
  if (round->notes) lacks = std::move(NotesOf(round)->excused);
  NotesOf(partition)->ended = UpdatedRound{round->number, std::move(round->update),
                                           std::move(round->accumulator.sum()), std::move(lacks)};
}

void CopiedRounds::OnFreed(Partition* partition) {
  if (partition->notes) NotesOf(partition)->ended.reset();
  if (HasCopy(*partition)) TellFreed(*partition);
  std::erase(states_, partition);
}

void CopiedRounds::SetBackup(uint64_t token) {
  token_ = token;
  std::vector<Partition*> waiting;
  for (Partition* partition : states_) {
    if (partition->is_held && !HasCopy(*partition)) waiting.push_back(partition);
  }
  for (Partition* partition : waiting) GoOn(partition);
  CopyNext();
}

void CopiedRounds::CopyNext() {
  if (token_ == 0) return;
  for (Partition* partition : states_) {
    if (HasCopy(*partition) || partition->is_held || partition->is_freed) continue;
    Copying what;
    what.kind = Copying::kAll;
    return TellAll(partition, std::move(what));
  }
  backup_->OnToldAll(token_);
}

// ------------------------------------------------------------------ acknowledgements

void CopiedRounds::OnCopied(Partition* partition, uint64_t number) {
  if (partition->is_held && NotesOf(partition)->copying->number == number) GoOn(partition);
}

void CopiedRounds::GoOn(Partition* partition) {
  const std::shared_ptr<Partition> stays = partition->shared_from_this();
  const Copying what = std::move(*NotesOf(partition)->copying);
  NotesOf(partition)->copying.reset();
  partition->is_held = false;
  const auto work = [&] { GoOn(partition, what); };
  thread_->Survive(work, [&](const std::exception& e) {
    const std::string reason = "server " + std::to_string(context_->channel->rank()) +
                               " could not continue with '" + partition->declaration().name +
                               "' after it was copied: " + e.what() + "; " + DescribeFreeMemory();
    BPS_LOG(ERROR) << reason;
    Fail(partition, what, reason);
  });
  thread_->ServeHeld(partition);
}

void CopiedRounds::GoOn(Partition* partition, const Copying& what) {
  if (partition->is_freed) return FreeLater(partition, what);
  switch (what.kind) {
    case Copying::kRound: {
      Round* const round = partition->Find(what.round);
      if (round != nullptr && !round->done) rounds_->Update(partition, round);
      break;
    }
    case Copying::kStep:
      ServeStep(context_, rounds_, partition, what.request, what.received, true);
      break;
    case Copying::kVerdict:
      MoveState(context_, rounds_, partition, what.request, what.received, true);
      break;
    case Copying::kLoad:
      backup_->HasState();
      context_->Answer(CallerOf(what.request, what.received), partition->key, "");
      break;
    case Copying::kAll:
      CopyNext();
  }
  rounds_->LetGo(partition);
  recovery_->EndWithoutAbsent(partition);
}

void CopiedRounds::Fail(Partition* partition, const Copying& what, const std::string& reason) {
  if (what.kind == Copying::kRound) {
    if (Round* const round = partition->Find(what.round))
      rounds_->FailUnanswered(partition, round, reason);
  } else if (what.kind != Copying::kAll) {
    context_->Refuse(what.request, reason);
  }
  rounds_->LetGo(partition);
  recovery_->EndWithoutAbsent(partition);
}

void CopiedRounds::FreeLater(Partition* partition, const Copying& what) {
  const auto stays = partition->shared_from_this();
  // The backup may have made a step that this server does not make. That does no harm, because both
  // drop the partition.
  rounds_->Free({stays});
  const bool has_request = what.kind != Copying::kRound && what.kind != Copying::kAll;
  if (has_request)
    context_->Refuse(what.request,
                     "'" + partition->declaration().name + "' was released by all members");
  if (what.kind == Copying::kLoad) backup_->HasState();
  if (what.kind == Copying::kAll) CopyNext();
}

}  // namespace core
}  // namespace byteps
