#ifndef BYTEPS_SERVER_UPDATES_H_
#define BYTEPS_SERVER_UPDATES_H_

#include <cstdint>
#include <string>

#include "byteps/base/protocol.h"
#include "byteps/cluster/channel.h"
#include "byteps/server/partition.h"
#include "byteps/server/rounds.h"
#include "byteps/server/server_context.h"

namespace byteps {
namespace core {

// Updates of parameters, for tensors with an UpdateRule. The server keeps the parameters and their
// moments (optimizer/).
//
// When a round is complete, the server updates the parameters and sends them to the members.
// Members that ask for different steps in a round get an error, and the state stays unchanged.
//
// A speculative step (PUSH_TRY) changes nothing: the new parameters are computed and sent, and the
// gradients are kept. The round stays until each member has decided about the step. The first
// decision is carried out: the step is made or dropped. A member that decides otherwise gets an
// error.

// Returns whether the part of a request after its header fits the rule of its tensor.
bool HasFormOfUpdate(const Message& message, const Declaration& declaration, uint64_t index);

// Returns the packed UpdateStep of a push or a STEP; "" for a push that asks for the norm first.
// Requests for this and the functions below have passed HasFormOfUpdate.
std::string StepOf(const Message& message);

// Applies a member's decision about its speculative step in round `number`, if the member has tried
// one. If `message` is a push, the member takes no further part in that round. Returns an error or
// "".
std::string SettleStep(Rounds* rounds, Partition* partition, const Message& message,
                       uint32_t number);

// Serves a STEP. `is_held`: whether the policy calls again, after RoundLossPolicy::HoldsStep has
// held the STEP.
void ServeStep(ServerContext* context, Rounds* rounds, Partition* partition, const Message& message,
               int64_t received, bool is_held = false);
// Serves a LOAD_STATE or READ_STATE. `is_held`: whether this is the policy's second call, after
// RoundLossPolicy::HoldsStep has held the verdict in a READ_STATE.
void MoveState(ServerContext* context, Rounds* rounds, Partition* partition, const Message& message,
               int64_t received, bool is_held = false);

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_SERVER_UPDATES_H_
