#ifndef BYTEPS_SERVER_FEEDBACK_H_
#define BYTEPS_SERVER_FEEDBACK_H_

#include <cstdint>

#include "byteps/base/protocol.h"
#include "byteps/cluster/channel.h"
#include "byteps/server/partition.h"
#include "byteps/server/server_context.h"

namespace byteps {
namespace core {

// Rounding losses of the last sum of a partition, in blocks with feedback. They are a part of the
// job's state, read and loaded as an optimizer's state is (LOAD_STATE, READ_STATE), in fp32.

// Whether a request is LOAD_STATE or READ_STATE of such a tensor, which no server updates.
bool MovesFeedback(int op, const Declaration& declaration);

// Serves one that has its form.  A member reads after it was answered, and loads before it pushes:
// no sum is complete then that the values are not of.
void MoveFeedback(ServerContext* context, Partition* partition, const Message& message,
                  int64_t received);

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_SERVER_FEEDBACK_H_
