#include "byteps/server/updates.h"

#include "byteps/base/invariant.h"
#include "byteps/base/wire.h"
#include "byteps/server/partition.h"
#include "byteps/server/round.h"
#include "byteps/server/round_loss_policy.h"
#include "byteps/server/rounds.h"
#include "byteps/server/server_context.h"

namespace byteps {
namespace core {
namespace {

// Returns whether a request's body begins with a verdict after the header.
bool HasVerdict(int op) { return op != kStep && op != kLoadState; }

std::string AllDetailOf(const Message& message) {
  PushHeader header;
  std::string detail;
  PushHeader::Unpack(message.body, &header, &detail);
  return detail;
}

Verdict VerdictOf(const Message& message) {
  if (!HasVerdict(message.op)) return Verdict::kNone;
  return static_cast<Verdict>(AllDetailOf(message)[0]);
}

uint32_t SlotOf(const Message& message) {
  const std::string slot = StepOf(message);
  return WireReader(slot).Get<uint32_t>();
}

}  // namespace

bool HasFormOfUpdate(const Message& message, const Declaration& declaration, uint64_t index) {
  const UpdateRule& rule = *declaration.rule;
  const uint64_t size = declaration.PartitionSize(index);
  const int op = message.op;
  const uint64_t offered = op == kReadState ? declaration.PartitionValues(index) * sizeof(float)
                                            : AnswerBytes(declaration.dtype, size);
  PushHeader header;
  std::string detail;
  if (!PushHeader::Unpack(message.body, &header, &detail)) return false;
  if (header.oldest > header.round) return false;
  if (header.pull_offset > offered || header.pull_bytes > offered - header.pull_offset) {
    return false;
  }
  if (HasVerdict(op)) {
    const int verdict = detail.empty() ? -1 : detail[0];
    if (verdict < 0 || verdict > static_cast<int>(Verdict::kDrop)) return false;
    detail.erase(0, 1);
  }
  if (op == kPushTry && !rule.speculative) return false;
  switch (op) {
    case kPushStep:
    case kPushTry:
    case kStep: {
      UpdateStep step;
      return UpdateStep::Unpack(detail, &step) && step.rates.size() == rule.groups.size();
    }
    case kPushNorm:
      return detail.empty() && header.pull_bytes == 0;
    case kLoadState:
    case kReadState: {
      WireReader in(detail);
      if (header.pull_offset % sizeof(float) != 0 || header.pull_bytes % sizeof(float) != 0) {
        return false;
      }
      return in.Get<uint32_t>() < declaration.NumSlots() && in.ok() && in.at_end();
    }
    default:
      return false;
  }
}

std::string StepOf(const Message& message) {
  return AllDetailOf(message).substr(HasVerdict(message.op) ? 1 : 0);
}

namespace {

// Returns the round's speculative step if the member has not fully decided on it, else null.
RoundUpdate* FindTried(Round* round, size_t member) {
  if (round == nullptr) return nullptr;  // all members are done with it
  RoundUpdate* const update = round->update.get();
  const bool is_open = !update->tried().empty() && round->pushed[member] && !round->told[member];
  return is_open ? update : nullptr;
}

UpdateStep StepThatIs(Verdict verdict, const RoundUpdate& update) {
  UpdateStep step;
  UpdateStep::Unpack(update.tried(), &step);
  step.skip = verdict == Verdict::kDrop;
  return step;
}

}  // namespace

std::string SettleStep(Rounds* rounds, Partition* partition, const Message& message,
                       uint32_t number) {
  const Declaration& declaration = partition->declaration();
  const int rank = message.peer;
  const int member = declaration.MemberIndex(rank);
  Round* const round = partition->Find(number);
  RoundUpdate* const update = FindTried(round, member);
  if (update == nullptr) return "";
  const Verdict verdict = VerdictOf(message);
  // The lost server may have answered the member's STEP.
  const bool may_know = update->is_restored() && update->is_updated();
  if (verdict == Verdict::kNone && !update->overtaken() && !may_know) {
    return "worker " + std::to_string(rank) + " goes on with '" + declaration.name +
           "' without committing or aborting its speculative step";
  }
  std::string error;
  if (verdict != Verdict::kNone && !update->overtaken()) {
    error = update->Decide(rank, StepThatIs(verdict, *update).Pack(), &round->accumulator.sum(),
                           &round->failure);
  }
  if (message.op != kReadState) {
    round->told[member] = true;
    rounds->DropDone(partition);
  }
  return error;
}

namespace {

// Returns the round that a member has pushed and may ask about. Returns null if the request was
// refused.
Round* FindPushed(ServerContext* context, Rounds* rounds, Partition* partition,
                  const Message& message) {
  const int rank = message.peer;
  const int member = partition->declaration().MemberIndex(rank);
  const uint32_t number = HeaderOf(message).round;
  Round* const round = partition->Find(number);
  const auto failed = partition->failures.find(number);
  if (round == nullptr && failed != partition->failures.end()) {
    PS_PROBE(kStepAfterFailure);
    context->Refuse(message, failed->second);
    return nullptr;
  }
  const std::string lacks = partition->state->NotLoaded();
  if (!lacks.empty()) {
    context->Refuse(message, lacks);
    return nullptr;
  }
  if (round == nullptr || !round->pushed[member] || round->told[member]) {
    context->Refuse(message, "worker " + std::to_string(rank) + " asks for a step of round " +
                                 std::to_string(number) + " of '" + partition->declaration().name +
                                 "' without having pushed it, or twice");
    return nullptr;
  }
  if (round->failure.empty()) return round;
  PS_PROBE(kStepAfterFailure);
  round->told[member] = true;
  context->Refuse(message, round->failure);
  rounds->DropDone(partition);
  return nullptr;
}

}  // namespace

void ServeStep(ServerContext* context, Rounds* rounds, Partition* partition, const Message& message,
               int64_t received, bool is_held) {
  const Declaration& declaration = partition->declaration();
  Round* const round = FindPushed(context, rounds, partition, message);
  if (round == nullptr) return;
  RoundUpdate* const update = round->update.get();
  if (!round->done || update->sums().empty()) {
    return context->Refuse(message, "worker " + std::to_string(message.peer) +
                                        " asks for a step of '" + declaration.name +
                                        "' before it was told the norm of its gradients");
  }
  const std::string step = StepOf(message);
  const bool may_wait = !is_held && !update->overtaken() && !update->is_updated();
  if (may_wait && rounds->losses()->HoldsStep(partition, message, step, received)) return;
  const std::string error =
      update->overtaken()
          ? "the state of '" + declaration.name + "' was loaded after that"
          : update->Decide(message.peer, step, &round->accumulator.sum(), &round->failure);
  if (is_held) update->NoteTold();
  if (!error.empty()) {
    round->told[declaration.MemberIndex(message.peer)] = true;
    context->Refuse(message, error);
    return rounds->DropDone(partition);
  }
  round->callers.push_back(CallerOf(message, received));
  rounds->Deliver(partition, round);
  rounds->DropDone(partition);
}

namespace {

// Returns whether the verdict in a READ_STATE must wait, because the policy holds the step.
bool HoldsVerdict(Rounds* rounds, Partition* partition, const Message& message, int64_t received) {
  const Verdict verdict = VerdictOf(message);
  const int member = partition->declaration().MemberIndex(message.peer);
  const RoundUpdate* const update = FindTried(partition->Find(HeaderOf(message).round), member);
  if (verdict == Verdict::kNone || update == nullptr || update->has_answer()) return false;
  return rounds->losses()->HoldsStep(partition, message, StepThatIs(verdict, *update).Pack(),
                                     received);
}

}  // namespace

void MoveState(ServerContext* context, Rounds* rounds, Partition* partition, const Message& message,
               int64_t received, bool is_held) {
  Caller caller = CallerOf(message, received);
  PartitionState* const state = partition->state.get();
  std::string error;
  SharedBytes values;
  if (message.op == kLoadState) {
    // State that a removed worker loads is refused, because the other workers continue with the
    // present state.
    if (rounds->losses()->Refuses(*partition, message)) return;
    if (message.values.empty()) throw OutOfMemory(message.sent_bytes);  // the values were dropped
    for (Round& round : partition->rounds) {
      const bool keeps = rounds->losses()->copies_state();
      round.update->Overtake(keeps ? &round.accumulator.sum() : nullptr);
      if (round.update->overtaken()) PS_PROBE(kStepOvertaken);
    }
    error = state->Load(SlotOf(message), message.values.data());
    if (error.empty() && rounds->losses()->HoldsLoad(partition, message, received)) return;
  } else {
    if (!is_held && HoldsVerdict(rounds, partition, message, received)) return;
    error = SettleStep(rounds, partition, message, HeaderOf(message).round);
    if (!error.empty()) return context->Refuse(message, error);
    values = SharedBytes::New(caller.bytes);
    error = state->Read(SlotOf(message), caller.offset, caller.bytes, values.data());
    caller.offset = 0;  // offset in the bytes to send
  }
  if (!error.empty()) return context->Refuse(message, error);
  context->Answer(caller, message.key, "", values.empty() ? nullptr : &values);
}

}  // namespace core
}  // namespace byteps
