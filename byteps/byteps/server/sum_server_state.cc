// What the server does for tensors with an UpdateRule.
#include <cstring>
#include <string>

#include "byteps/base/wire.h"
#include "byteps/server/sum_server.h"
#include "ps/internal/postoffice.h"

namespace byteps {
namespace core {
namespace {

std::string DetailOf(const ps::Message& msg) {
  PushHeader header;
  std::string detail;
  PushHeader::Unpack(msg.meta.body, &header, &detail);
  return detail;
}

// Of a request that HasFormOfUpdate().
uint32_t SlotOf(const ps::Message& msg) {
  const std::string detail = DetailOf(msg);
  return WireReader(detail).Get<uint32_t>();
}

std::string Describe(const std::string& step) {
  UpdateStep read;
  if (step.empty()) return "the norm of the gradients first";
  return UpdateStep::Unpack(step, &read) ? read.Describe() : "";
}

}  // namespace

bool Server::HasFormOfUpdate(const ps::Message& msg, const Declaration& declaration,
                             uint64_t index) {
  const UpdateRule& rule = *declaration.rule;
  const uint64_t size = declaration.PartitionSize(index);
  const int op = msg.meta.head;
  PushHeader header;
  std::string detail;
  if (!PushHeader::Unpack(msg.meta.body, &header, &detail)) return false;
  if (header.pull_offset > size || header.pull_bytes > size - header.pull_offset) return false;
  uint64_t values = 0;
  if (op == kPushStep || op == kPushNorm) values = size;
  if (op == kLoadState) values = size / SizeOf(declaration.dtype) * sizeof(float);
  if (values == 0 ? !msg.data.empty() : msg.data.size() != 1 || msg.data[0].size() != values) {
    return false;
  }
  switch (op) {
    case kPushStep:
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

bool Server::AgreesOnStep(const Declaration& declaration, const ps::Message& msg, Round* round,
                          std::string* error) {
  const std::string step = DetailOf(msg);
  const int rank = ps::Postoffice::IDtoRank(msg.meta.sender);
  if (round->step_of < 0) {
    round->step = step;
    round->step_of = rank;
  }
  if (round->step == step) return true;
  *error = "workers disagree on a step of '" + declaration.name + "': worker " +
           std::to_string(round->step_of) + " asks for " + Describe(round->step) + ", worker " +
           std::to_string(rank) + " for " + Describe(step);
  return false;
}

std::string Server::UpdateState(Partition* partition, const ps::Message& msg, Round* round) {
  if (msg.meta.head == kPushNorm) {
    const double squares = partition->state->SumOfSquares(round->sum.data());
    round->norm.resize(sizeof(squares));
    memcpy(round->norm.data(), &squares, sizeof(squares));
    round->step_of = -1;  // who is told asks for a step then
    return "";
  }
  UpdateStep step;
  UpdateStep::Unpack(round->step, &step);
  round->updated = true;
  if (step.skip) return partition->state->ReadParameters(round->sum.data());
  counters_.updated_partitions.Add();
  return partition->state->Update(step, round->sum.data());
}

void Server::Step(Partition* partition, const ps::Message& msg, int64_t received) {
  const Declaration& declaration = partition->tensor->declaration;
  Caller caller = CallerOf(msg, received);
  Round* round = FindPushed(partition, msg, caller);
  if (round == nullptr) return;
  if (!round->done || round->norm.empty()) {
    return Refuse(msg, "worker " + std::to_string(caller.rank) + " asks for a step of '" +
                           declaration.name + "' before it was told the norm of its gradients");
  }
  std::string error;
  if (AgreesOnStep(declaration, msg, round, &error) && !round->updated) {
    round->failure = error = UpdateState(partition, msg, round);
  }
  if (!error.empty()) {
    round->told[declaration.MemberIndex(caller.rank)] = true;
    Refuse(msg, error);
    return DropDoneRounds(partition);
  }
  round->callers.push_back(caller);
  Deliver(partition, round);
  DropDoneRounds(partition);
}

void Server::MoveState(Partition* partition, const ps::Message& msg, int64_t received) {
  Caller caller = CallerOf(msg, received);
  PartitionState* const state = partition->state.get();
  std::string error;
  ps::SArray<char> values;
  if (msg.meta.head == kLoadState) {
    error = state->Load(SlotOf(msg), msg.data[0].data());
  } else {
    values.resize(state->size() * sizeof(float));
    error = state->Read(SlotOf(msg), values.data());
    caller.offset = 0;
    caller.bytes = static_cast<uint32_t>(values.size());
  }
  if (!error.empty()) return Refuse(msg, error);
  Answer(caller, msg.meta.key, "", values.empty() ? nullptr : &values);
}

}  // namespace core
}  // namespace byteps
