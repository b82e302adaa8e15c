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

// Updates tensors with an UpdateRule. The server keeps their parameters and moments (optimizer/).
//
// When a round is complete the parameters are updated, and the answer has them.  Members that ask
// for different steps in one round get an error; the state is as it was.
//
// A step that is tried (PUSH_TRY) changes nothing: parameters are computed from the state and sent,
// and the gradients are kept.  The round stays until each member has said what becomes of the step.
// The first one who does so has it made, or dropped; a member that says something else gets an
// error.

// Whether what follows a request's header is as the tensor's rule wants it.
bool HasFormOfUpdate(const Message& message, const Declaration& declaration, uint64_t index);

// All others are of requests that have this form.  Of a push: the packed UpdateStep that it asks
// for; "" where it wants the norm first.
std::string StepOf(const Message& message);

// Takes what a member says of the step that it tried in the round of this number, if it tried one.
// A push is its last word on it.  Why it cannot be, or "".
std::string SettleStep(Rounds* rounds, Partition* partition, const Message& message,
                       uint32_t number);

// STEP.  `is_held`: RoundLossPolicy::HoldsStep has held it, and lets it go on.
void ServeStep(ServerContext* context, Rounds* rounds, Partition* partition, const Message& message,
               int64_t received, bool is_held = false);
// LOAD_STATE and READ_STATE.  `is_held`: the same of what a READ_STATE says.
void MoveState(ServerContext* context, Rounds* rounds, Partition* partition, const Message& message,
               int64_t received, bool is_held = false);

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_SERVER_UPDATES_H_
