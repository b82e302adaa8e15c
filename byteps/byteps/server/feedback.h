#ifndef BYTEPS_SERVER_FEEDBACK_H_
#define BYTEPS_SERVER_FEEDBACK_H_

#include <cstdint>

#include "byteps/base/protocol.h"
#include "byteps/cluster/channel.h"
#include "byteps/server/partition.h"
#include "byteps/server/server_context.h"

namespace byteps {
namespace core {

// Rounding errors of a partition's last sum, for blocks with feedback. They are part of the job's
// state: workers write and read them in fp32 by LOAD_STATE and READ_STATE, like optimizer state.

// Returns whether a request moves rounding errors: a LOAD_STATE or READ_STATE of a tensor without a
// rule.
bool MovesFeedback(int op, const Declaration& declaration);

// Serves a request that has passed HasForm. No sum of the partition can complete at that time,
// because a member reads only when it has the answer to its last push, and loads before its next
// push.
void MoveFeedback(ServerContext* context, Partition* partition, const Message& message,
                  int64_t received);

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_SERVER_FEEDBACK_H_
