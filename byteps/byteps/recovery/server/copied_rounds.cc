// Rounds of a copied state: what the backup is told before members are answered.
//
// A partition tells one thing at a time, and serves no request until the backup has it.
#include <bit>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/base/wire.h"
#include "byteps/recovery/server/backup_link.h"
#include "byteps/recovery/server/copies.h"
#include "byteps/recovery/server/copy_record.h"
#include "byteps/server/rounds.h"

namespace byteps {
namespace core {

// ------------------------------------------------------------------ what a backup is told

bool Rounds::HasCopy(const Partition& partition) const {
  return pass_ != 0 && partition.pass == pass_;
}

LastRound Rounds::LastOf(Partition* partition) {
  for (auto it = partition->rounds.rbegin(); it != partition->rounds.rend(); ++it) {
    const bool has_update = it->done && it->failure.empty() && it->update->pushed_by() != 0;
    if (has_update) return {it->number, it->update.get(), it->accumulator.sum(), it->excused};
  }
  if (!partition->ended) return {};
  const UpdatedRound& ended = *partition->ended;
  return {ended.number, ended.update.get(), ended.sum, ended.excused};
}

RoundUpdate* Rounds::LastUpdate(Partition* partition) {
  for (auto it = partition->rounds.rbegin(); it != partition->rounds.rend(); ++it) {
    if (it->done && it->update->pushed_by() != 0) return it->update.get();
  }
  return partition->ended ? partition->ended->update.get() : nullptr;
}

void Rounds::Tell(Partition* partition, Copying&& what, CopyRecord record, SharedBytes values) {
  record.pass = pass_;
  // A decision and a whole state say themselves what was settled.
  RoundUpdate* const last = record.settled.empty() ? LastUpdate(partition) : nullptr;
  if (last != nullptr && !record.is_all) record.settled = last->Settled();
  what.number = context_->backup->Tell(partition->key, record, std::move(values));
  partition->copying = std::move(what);
  if (last != nullptr) last->NoteTold();
}

void Rounds::TellAll(Partition* partition, Copying&& what) {
  PS_PROBE(kStateCopied);
  SharedBytes values;
  CopyRecord record =
      RecordOfAll(partition->declaration(), *partition->state, LastOf(partition), &values);
  Tell(partition, std::move(what), std::move(record), std::move(values));
  partition->pass = pass_;
}

void Rounds::TellFreed(const Partition& partition) {
  CopyRecord record;
  record.pass = pass_;
  record.what = CopyRecord::kFreed;
  context_->backup->Tell(partition.key, record, {});
}

bool Rounds::CopyRound(Partition* partition, Round* round) {
  if (!HasCopy(*partition)) return false;
  PS_PROBE(kRoundCopied);
  const RoundUpdate& update = *round->update;
  CopyRecord record;
  record.what = CopyRecord::kRound;
  record.round = round->number;
  record.op = static_cast<uint8_t>(update.op());
  record.step = update.step();
  record.rank = static_cast<uint32_t>(update.asked_by());
  record.lacks = PackMembers(round->excused);
  Copying what;
  what.round = round->number;
  Tell(partition, std::move(what), std::move(record), round->accumulator.sum());
  return true;
}

bool Rounds::CopyStep(Partition* partition, const Message& message, int64_t received) {
  if (!HasCopy(*partition)) return false;
  PS_PROBE(kStepCopied);
  TellDecision(partition, Copying::kStep, message, StepOf(message), received);
  return true;
}

bool Rounds::CopyVerdict(Partition* partition, const Message& message, const UpdateStep& step,
                         int64_t received) {
  if (!HasCopy(*partition)) return false;
  PS_PROBE(kVerdictCopied);
  TellDecision(partition, Copying::kVerdict, message, step.Pack(), received);
  return true;
}

void Rounds::TellDecision(Partition* partition, Copying::Kind kind, const Message& message,
                          std::string step, int64_t received) {
  CopyRecord record;
  record.settled = std::move(step);
  record.round = HeaderOf(message).round;
  record.rank = static_cast<uint32_t>(message.peer);
  Copying what;
  what.kind = kind;
  what.request = message;
  what.received = received;
  Tell(partition, std::move(what), std::move(record), {});
}

bool Rounds::CopyLoad(Partition* partition, const Message& message, int64_t received) {
  if (context_->backup == nullptr) return false;
  Adopt(partition);
  if (pass_ == 0) {
    context_->backup->HasState();
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

void Rounds::Adopt(Partition* partition) {
  if (context_->backup == nullptr || partition->has_state) return;
  if (!partition->is_listed) partitions_.push_back(partition);
  partition->is_listed = true;
  states_.push_back(partition);
  partition->has_state = true;
  for (const int rank : absent_) {
    if (partition->declaration().MemberIndex(rank) < 0) continue;
    for (Round& round : partition->rounds) Excuse(partition, &round, rank);
  }
  DropDone(partition);
}

std::vector<Partition*> Rounds::SetBackup(uint64_t pass) {
  pass_ = pass;
  std::vector<Partition*> waiting;
  for (Partition* partition : states_) {
    if (partition->copying && !HasCopy(*partition)) waiting.push_back(partition);
  }
  return waiting;
}

void Rounds::CopyNext() {
  if (pass_ == 0) return;
  for (Partition* partition : states_) {
    if (HasCopy(*partition) || partition->copying || partition->is_freed) continue;
    Copying what;
    what.kind = Copying::kAll;
    return TellAll(partition, std::move(what));
  }
  context_->backup->OnToldAll(pass_);
}

// ------------------------------------------------------------------ that it has it

void Rounds::GoOn(Partition* partition, const Copying& what) {
  if (partition->is_freed) return FreeLater(partition, what);
  switch (what.kind) {
    case Copying::kRound: {
      Round* const round = partition->Find(what.round);
      if (round != nullptr && !round->done) Update(partition, round);
      break;
    }
    case Copying::kStep:
      ServeStep(context_, this, partition, what.request, what.received, true);
      break;
    case Copying::kVerdict:
      MoveState(context_, this, partition, what.request, what.received, true);
      break;
    case Copying::kLoad:
      context_->backup->HasState();
      context_->Answer(CallerOf(what.request, what.received), partition->key, "");
      break;
    case Copying::kAll:
      CopyNext();
  }
  EndCopying(partition);
}

void Rounds::EndCopying(Partition* partition) {
  // Unless it waits again.
  while (!partition->copying && !partition->released_by.empty()) {
    Release(partition, partition->released_by.back());
    partition->released_by.pop_back();
  }
  EndWithoutAbsent(partition);
}

void Rounds::FailCopied(Partition* partition, const Copying& what, const std::string& reason) {
  if (what.kind == Copying::kRound) {
    if (Round* const round = partition->Find(what.round)) FailUnanswered(partition, round, reason);
  } else if (what.kind != Copying::kAll) {
    context_->Refuse(what.request, reason);
  }
  EndCopying(partition);
}

void Rounds::FreeLater(Partition* partition, const Copying& what) {
  const auto stays = partition->shared_from_this();
  // Its backup may have made a step that is not made here: both have nothing of it any more.
  Free({stays});
  const bool has_request = what.kind != Copying::kRound && what.kind != Copying::kAll;
  if (has_request)
    context_->Refuse(what.request,
                     "'" + partition->declaration().name + "' was released by all members");
  if (what.kind == Copying::kLoad) context_->backup->HasState();
  if (what.kind == Copying::kAll) CopyNext();
}

bool Rounds::AnswerAgain(Partition* partition, const Message& message, int64_t received) {
  Round* const round = partition->Find(HeaderOf(message).round);
  const int member = partition->declaration().MemberIndex(message.peer);
  if (round == nullptr || !round->is_restored || round->told[member]) return false;
  if (absent_.count(message.peer) > 0) return false;
  PS_PROBE(kAnsweredAgain);
  if (!round->update->IsLike(message.op, StepOf(message))) {
    context_->Refuse(message, "worker " + std::to_string(message.peer) +
                                  " asks for another step of '" + partition->declaration().name +
                                  "' than the others did before a server was lost");
    return true;
  }
  Caller caller = CallerOf(message, received);
  if (message.op == kPushNorm) caller.bytes = sizeof(GradientSums);
  round->callers.push_back(caller);
  Deliver(partition, round);
  DropDone(partition);
  return true;
}

}  // namespace core
}  // namespace byteps
