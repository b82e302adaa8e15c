// What rounds come to where a server keeps state: parameters, what rounding lost; and what all
// parts of one server share.
#include <cstring>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/process.h"
#include "byteps/base/wire.h"
#include "byteps/server/partition.h"
#include "byteps/server/round.h"
#include "byteps/server/rounds.h"
#include "byteps/server/server_context.h"

namespace byteps {
namespace core {
namespace {

// Whether the detail of a request begins with a verdict.
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

// The step that this member has tried in the round, and has not said everything of; null: none.
RoundUpdate* FindTried(Round* round, size_t member) {
  if (round == nullptr) return nullptr;  // all members are through with it
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
  // A server that is lost may have answered its STEP.
  const bool may_know = round->is_restored && update->is_updated();
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

void ServeStep(ServerContext* context, Rounds* rounds, Partition* partition, const Message& message,
               int64_t received, bool is_copied) {
  const Declaration& declaration = partition->declaration();
  Round* const round = rounds->FindPushed(partition, message);
  if (round == nullptr) return;
  RoundUpdate* const update = round->update.get();
  if (!round->done || update->sums().empty()) {
    return context->Refuse(message, "worker " + std::to_string(message.peer) +
                                        " asks for a step of '" + declaration.name +
                                        "' before it was told the norm of its gradients");
  }
  const bool is_new = !update->overtaken() && !update->is_updated();
  if (is_new && !is_copied && rounds->CopyStep(partition, message, received)) return;
  const std::string error = update->overtaken()
                                ? "the state of '" + declaration.name + "' was loaded after that"
                                : update->Decide(message.peer, StepOf(message),
                                                 &round->accumulator.sum(), &round->failure);
  if (is_copied) update->NoteTold();
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

// Whether a READ_STATE is served, or goes on, once the backup knows the verdict that it has.
bool CopyVerdictOf(Rounds* rounds, Partition* partition, const Message& message, int64_t received) {
  const Verdict verdict = VerdictOf(message);
  const int member = partition->declaration().MemberIndex(message.peer);
  const RoundUpdate* const update = FindTried(partition->Find(HeaderOf(message).round), member);
  if (verdict == Verdict::kNone || update == nullptr || update->has_answer()) return false;
  return rounds->CopyVerdict(partition, message, StepThatIs(verdict, *update), received);
}

}  // namespace

void MoveState(ServerContext* context, Rounds* rounds, Partition* partition, const Message& message,
               int64_t received, bool is_copied) {
  Caller caller = CallerOf(message, received);
  PartitionState* const state = partition->state.get();
  std::string error;
  SharedBytes values;
  if (message.op == kLoadState) {
    // The others go on with the state that there is.
    if (rounds->RefuseAbsent(partition, message, "loaded state")) return;
    if (message.values.empty()) throw OutOfMemory(message.sent_bytes);  // they were dropped
    for (Round& round : partition->rounds) {
      const bool keeps = context->backup != nullptr;
      round.update->Overtake(keeps ? &round.accumulator.sum() : nullptr);
      if (round.update->overtaken()) PS_PROBE(kStepOvertaken);
    }
    error = state->Load(SlotOf(message), message.values.data());
    if (error.empty() && rounds->CopyLoad(partition, message, received)) return;
  } else {
    if (!is_copied && CopyVerdictOf(rounds, partition, message, received)) return;
    error = SettleStep(rounds, partition, message, HeaderOf(message).round);
    if (!error.empty()) return context->Refuse(message, error);
    values = SharedBytes::New(caller.bytes);
    error = state->Read(SlotOf(message), caller.offset, caller.bytes, values.data());
    caller.offset = 0;  // of what is sent
  }
  if (!error.empty()) return context->Refuse(message, error);
  context->Answer(caller, message.key, "", values.empty() ? nullptr : &values);
}

namespace {

// Of a bfloat16 in a float, on CPUs that are little-endian.
constexpr int kUpperHalf = 16;

std::vector<uint16_t> Halves(const char* values, uint64_t count) {
  std::vector<uint16_t> halves(count);
  for (uint64_t i = 0; i < count; ++i) {
    uint32_t word;
    memcpy(&word, values + i * sizeof(word), sizeof(word));
    halves[i] = static_cast<uint16_t>(word >> kUpperHalf);
  }
  return halves;
}

}  // namespace

bool MovesFeedback(int op, const Declaration& declaration) {
  return declaration.feedback && !declaration.rule && (op == kLoadState || op == kReadState);
}

void MoveFeedback(ServerContext* context, Partition* partition, const Message& message,
                  int64_t received) {
  Caller caller = CallerOf(message, received);
  const uint64_t count = partition->declaration().PartitionValues(partition->index);
  if (message.op == kLoadState) {
    if (message.values.empty()) throw OutOfMemory(message.sent_bytes);  // they were dropped
    partition->lost = Halves(message.values.data(), count);
    return context->Answer(caller, message.key, "");
  }
  SharedBytes values = SharedBytes::New(caller.bytes);
  const uint64_t first = caller.offset / sizeof(uint32_t);
  for (uint64_t i = 0; i < caller.bytes / sizeof(uint32_t); ++i) {
    const uint64_t at = first + i;  // before the first sum, nothing was lost
    const uint32_t half = at < partition->lost.size() ? partition->lost[at] : 0;
    const uint32_t word = half << kUpperHalf;
    memcpy(values.data() + i * sizeof(word), &word, sizeof(word));
  }
  caller.offset = 0;  // of what is sent
  context->Answer(caller, message.key, "", values.empty() ? nullptr : &values);
}

PushHeader HeaderOf(const Message& message) {
  PushHeader header;
  std::string rest;
  PushHeader::Unpack(message.body, &header, &rest);
  return header;
}

Caller CallerOf(const Message& message, int64_t received) {
  const PushHeader header = HeaderOf(message);
  const int64_t now = SteadyNs();
  return {message.peer,
          message.number,
          message.op,
          header.pull_offset,
          header.pull_bytes,
          (header.flags & PushHeader::kKeepsSums) != 0,
          received,
          now,
          now};
}

}  // namespace core
}  // namespace byteps
