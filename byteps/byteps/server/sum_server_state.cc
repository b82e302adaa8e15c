// What the server does for tensors with an UpdateRule.
#include <cstring>
#include <string>

#include "byteps/base/invariant.h"
#include "byteps/base/out_of_memory.h"
#include "byteps/base/probe.h"
#include "byteps/base/wire.h"
#include "byteps/server/sum_server.h"

namespace byteps {
namespace core {
namespace {

// Whether the detail of a request begins with a verdict.
bool HasVerdict(int op) { return op != kStep && op != kLoadState; }

PushHeader HeaderOf(const Message& message, std::string* detail) {
  PushHeader header;
  PushHeader::Unpack(message.body, &header, detail);
  return header;
}

std::string AllDetailOf(const Message& message) {
  std::string detail;
  HeaderOf(message, &detail);
  return detail;
}

// The step, or slot.
std::string DetailOf(const Message& message) {
  return AllDetailOf(message).substr(HasVerdict(message.op) ? 1 : 0);
}

// Of a request that HasFormOfUpdate().
Verdict VerdictOf(const Message& message) {
  return HasVerdict(message.op) ? static_cast<Verdict>(AllDetailOf(message)[0]) : Verdict::kNone;
}

// Of a request that HasFormOfUpdate().
uint32_t SlotOf(const Message& message) {
  const std::string detail = DetailOf(message);
  return WireReader(detail).Get<uint32_t>();
}

std::string Describe(int op, const std::string& step) {
  UpdateStep read;
  if (step.empty()) return "the norm of the gradients first";
  if (!UpdateStep::Unpack(step, &read)) return "";
  return read.Describe() + (op == kPushTry ? ", to be tried" : "");
}

}  // namespace

bool Server::HasFormOfUpdate(const Message& message, const Declaration& declaration,
                             uint64_t index) {
  const UpdateRule& rule = *declaration.rule;
  const uint64_t size = declaration.PartitionSize(index);
  const int op = message.op;
  const uint64_t state = size / SizeOf(declaration.dtype) * sizeof(float);
  const uint64_t offered = op == kReadState ? state : size;
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
      return in.Get<uint32_t>() < rule.NumSlots() && in.ok() && in.at_end();
    }
    default:
      return false;
  }
}

std::string Server::Agree(const Declaration& declaration, int rank, int op, const std::string& step,
                          Round* round) {
  if (round->step_of < 0) {
    round->step = step;
    round->step_of = rank;
    round->step_op = op;
  }
  if (round->step == step && round->step_op == op) return "";
  return "workers disagree on a step of '" + declaration.name + "': worker " +
         std::to_string(round->step_of) + " asks for " + Describe(round->step_op, round->step) +
         ", worker " + std::to_string(rank) + " for " + Describe(op, step);
}

std::string Server::AgreeOnPush(const Declaration& declaration, const Message& message,
                                Round* round) {
  const int rank = message.peer;
  return Agree(declaration, rank, message.op, DetailOf(message), round);
}

std::string Server::CompleteUpdate(Partition* partition, Round* round) {
  const PartitionState& state = *partition->state;
  if (round->step_op == kPushStep) return MakeStep(partition, round);
  const GradientSums sums = state.SumsOf(round->sum.data());
  round->sums = SharedBytes::New(sizeof(sums));
  memcpy(round->sums.data(), &sums, sizeof(sums));
  if (round->step_op == kPushTry) {
    UpdateStep step;
    UpdateStep::Unpack(round->step, &step);
    round->parameters = std::move(round->spare);
    if (round->parameters.empty()) {
      PS_PROBE(kNoSpareMemory);
      round->parameters = SharedBytes::New(round->sum.size());
    }
    const std::string error = state.Preview(step, round->sum.data(), round->parameters.data());
    if (!error.empty()) return error;
    round->tried = round->step;
    counters_.tried_partitions.Add();
  }
  round->step_of = -1;  // who is told of these says what to do then
  return "";
}

std::string Server::MakeStep(Partition* partition, Round* round) {
  UpdateStep step;
  UpdateStep::Unpack(round->step, &step);
  BPS_INVARIANT("a step is kept or dropped, once", !round->updated,
                "round " + std::to_string(round->number) + " of '" +
                    partition->tensor->declaration.name + "'");
  round->updated = true;
  const bool was_tried = !round->tried.empty();
  if (was_tried) step.skip ? PS_PROBE(kStepDropped) : PS_PROBE(kStepMade);
  if (step.skip) return partition->state->ReadParameters(round->sum.data());
  if (was_tried && round->step != round->tried) {
    PS_PROBE(kStepRedone);
    counters_.redone_partitions.Add();
  }
  counters_.updated_partitions.Add();
  return partition->state->Update(step, round->sum.data());
}

std::string Server::Decide(Partition* partition, int rank, const std::string& step, Round* round) {
  const Declaration& declaration = partition->tensor->declaration;
  const std::string error = Agree(declaration, rank, kStep, step, round);
  if (error.empty() && !round->updated) round->failure = MakeStep(partition, round);
  return error.empty() ? round->failure : error;
}

std::string Server::Settle(Partition* partition, const Message& message, uint32_t number) {
  const Declaration& declaration = partition->tensor->declaration;
  const int rank = message.peer;
  const int member = declaration.MemberIndex(rank);
  const uint32_t ahead = number - partition->first_round;
  if (ahead >= partition->rounds.size()) return "";  // all members are through with it
  Round* const round = &partition->rounds[ahead];
  if (round->tried.empty() || !round->pushed[member] || round->told[member]) return "";
  const Verdict verdict = VerdictOf(message);
  if (verdict == Verdict::kNone && !round->overtaken) {
    return "worker " + std::to_string(rank) + " goes on with '" + declaration.name +
           "' without having said what becomes of the step that it tried";
  }
  std::string error;
  if (!round->overtaken) {
    UpdateStep step;
    UpdateStep::Unpack(round->tried, &step);
    step.skip = verdict == Verdict::kDrop;
    error = Decide(partition, rank, step.Pack(), round);
  }
  if (message.op != kReadState) {
    round->told[member] = true;
    DropDoneRounds(partition);
  }
  return error;
}

void Server::Step(Partition* partition, const Message& message, int64_t received) {
  const Declaration& declaration = partition->tensor->declaration;
  Caller caller = CallerOf(message, received);
  Round* round = FindPushed(partition, message, caller);
  if (round == nullptr) return;
  if (!round->done || round->sums.empty()) {
    return Refuse(message, "worker " + std::to_string(caller.rank) + " asks for a step of '" +
                           declaration.name + "' before it was told the norm of its gradients");
  }
  const std::string error = round->overtaken
                                ? "the state of '" + declaration.name + "' was loaded after that"
                                : Decide(partition, caller.rank, DetailOf(message), round);
  if (!error.empty()) {
    round->told[declaration.MemberIndex(caller.rank)] = true;
    Refuse(message, error);
    return DropDoneRounds(partition);
  }
  round->callers.push_back(caller);
  Deliver(partition, round);
  DropDoneRounds(partition);
}

void Server::MoveState(Partition* partition, const Message& message, int64_t received) {
  Caller caller = CallerOf(message, received);
  PartitionState* const state = partition->state.get();
  std::string error;
  SharedBytes values;
  if (message.op == kLoadState) {
    if (message.values.empty()) throw OutOfMemory(message.sent_bytes);  // they were dropped
    error = state->Load(SlotOf(message), message.values.data());
    for (Round& round : partition->rounds) {
      round.overtaken = !round.tried.empty();
      if (round.overtaken) PS_PROBE(kStepOvertaken);
    }
  } else {
    std::string detail;
    error = Settle(partition, message, HeaderOf(message, &detail).round);
    if (!error.empty()) return Refuse(message, error);
    values = SharedBytes::New(caller.bytes);
    error = state->Read(SlotOf(message), caller.offset, caller.bytes, values.data());
    caller.offset = 0;  // of what is sent
  }
  if (!error.empty()) return Refuse(message, error);
  Answer(caller, message.key, "", values.empty() ? nullptr : &values);
}

}  // namespace core
}  // namespace byteps
