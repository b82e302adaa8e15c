// Conversion of messages to and from ps-lite's.
#ifndef BYTEPS_CLUSTER_PS_MESSAGE_H_
#define BYTEPS_CLUSTER_PS_MESSAGE_H_

#include "byteps/base/config.h"
#include "byteps/cluster/channel.h"
#include "ps/internal/message.h"

namespace byteps {
namespace core {

// Converts a message to ps-lite's. Shares the values, and does not copy them.
ps::Message ToPs(const Message& message);

// Converts a message of ps-lite that arrived at a node of role `here`. Moves body and values.
Message FromPs(ps::Message* message, Role here);
// Converts the head of a message of ps-lite. The head arrives before the rest.
MessageHead HeadOf(const ps::Meta& meta, Role here);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_CLUSTER_PS_MESSAGE_H_
