// Rounds of a state that another server has a copy of: what it is told before members are answered,
// and rounds that a server has from such a copy.
//
// A partition tells one thing at a time, and serves no request until the backup has it.
#include <utility>

#include "byteps/base/declaration_list.h"
#include "byteps/base/probe.h"
#include "byteps/base/wire.h"
#include "byteps/server/backup_link.h"
#include "byteps/server/rounds.h"
#include "byteps/server/updates.h"

namespace byteps {
namespace core {

// ------------------------------------------------------------------ what a backup is told

bool Rounds::HasCopy(const Partition& partition) const {
  return pass_ != 0 && partition.pass == pass_;
}

LastRound Rounds::LastOf(Partition* partition) {
  for (auto it = partition->rounds.rbegin(); it != partition->rounds.rend(); ++it) {
    const bool has_update = it->done && it->failure.empty() && it->update->pushed_by() != 0;
    if (has_update) return {it->number, it->update.get(), it->accumulator.sum()};
  }
  if (!partition->ended) return {};
  return {partition->ended->number, partition->ended->update.get(), partition->ended->sum};
}

std::string Rounds::TakeSettled(Partition* partition) {
  for (auto it = partition->rounds.rbegin(); it != partition->rounds.rend(); ++it) {
    if (it->done && it->update->pushed_by() != 0) return it->update->TakeSettled();
  }
  return partition->ended ? partition->ended->update->TakeSettled() : "";
}

void Rounds::Tell(Partition* partition, Copying what, CopyRecord record, SharedBytes values) {
  record.pass = pass_;
  what.number = context_->backup->Tell(partition->key, record, std::move(values));
  partition->copying = std::move(what);
}

void Rounds::TellAll(Partition* partition, Copying what) {
  PS_PROBE(kStateCopied);
  SharedBytes values;
  CopyRecord record =
      RecordOfAll(partition->declaration(), *partition->state, LastOf(partition), &values);
  TakeSettled(partition);  // it says so
  partition->pass = pass_;
  Tell(partition, std::move(what), std::move(record), std::move(values));
}

bool Rounds::CopyRound(Partition* partition, Round* round) {
  if (!HasCopy(*partition)) return false;
  PS_PROBE(kRoundCopied);
  const RoundUpdate& update = *round->update;
  CopyRecord record;
  record.what = CopyRecord::kRound;
  record.settled = TakeSettled(partition);
  record.round = round->number;
  record.op = static_cast<uint8_t>(update.op());
  record.step = update.step();
  record.rank = static_cast<uint32_t>(update.asked_by());
  Copying what;
  what.round = round->number;
  Tell(partition, std::move(what), std::move(record), round->accumulator.sum());
  return true;
}

bool Rounds::CopyStep(Partition* partition, const Message& message, int64_t received) {
  if (!HasCopy(*partition)) return false;
  PS_PROBE(kStepCopied);
  CopyRecord record;
  record.settled = StepOf(message);
  record.round = HeaderOf(message).round;
  record.rank = static_cast<uint32_t>(message.peer);
  Copying what;
  what.kind = Copying::kStep;
  what.request = message;
  what.received = received;
  Tell(partition, std::move(what), std::move(record), {});
  return true;
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
  record.settled = TakeSettled(partition);
  record.declaration = PackDeclarations({partition->declaration()});
  const std::string slot = StepOf(message);
  record.slots = 1U << WireReader(slot).Get<uint32_t>();
  Tell(partition, std::move(what), std::move(record), message.values);
  return true;
}

void Rounds::Adopt(Partition* partition) {
  if (context_->backup == nullptr || std::exchange(partition->has_state, true)) return;
  states_.push_back(partition);
}

std::vector<Partition*> Rounds::SetBackup(uint64_t pass) {
  pass_ = pass;
  std::vector<Partition*> waiting;
  for (Partition* partition : states_) {
    if (!partition->copying) continue;
    if (pass_ != 0 && partition->copying->kind == Copying::kLoad) {
      TellAll(partition, std::move(*partition->copying));
    } else {
      waiting.push_back(partition);
    }
  }
  return waiting;
}

void Rounds::CopyNext() {
  if (pass_ == 0) return;
  for (Partition* partition : states_) {
    if (HasCopy(*partition) || partition->copying) continue;
    Copying what;
    what.kind = Copying::kAll;
    return TellAll(partition, std::move(what));
  }
  context_->backup->OnToldAll(pass_);
}

// ------------------------------------------------------------------ that it has it

void Rounds::GoOn(Partition* partition) {
  const Copying what = std::move(*partition->copying);
  partition->copying.reset();
  switch (what.kind) {
    case Copying::kRound: {
      Round* const round = partition->Find(what.round);
      if (round != nullptr && !round->done) Update(partition, round);
      return DropDone(partition);
    }
    case Copying::kStep:
      return ServeStep(context_, this, partition, what.request, what.received, true);
    case Copying::kLoad:
      context_->backup->HasState();
      return context_->Answer(CallerOf(what.request, what.received), partition->key, "");
    case Copying::kAll:
      return CopyNext();
  }
}

bool Rounds::AnswerAgain(Partition* partition, const Message& message, int64_t received) {
  Round* const round = partition->Find(HeaderOf(message).round);
  const int member = partition->declaration().MemberIndex(message.peer);
  if (round == nullptr || !round->is_restored || round->told[member]) return false;
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
