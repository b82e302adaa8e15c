// Conversion of messages to and from ps-lite's.
#ifndef BYTEPS_CLUSTER_PS_MESSAGE_H_
#define BYTEPS_CLUSTER_PS_MESSAGE_H_

#include "byteps/base/config.h"
#include "byteps/cluster/channel.h"
#include "ps/internal/message.h"

namespace byteps {
namespace core {

// The values are shared, not copied.
ps::Message ToPs(const Message& message);

// Converts a message that arrived at a node of this role. Moves body and values.
Message FromPs(ps::Message* message, Role here);
// Converts the head, which arrives first.
MessageHead HeadOf(const ps::Meta& meta, Role here);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_CLUSTER_PS_MESSAGE_H_
