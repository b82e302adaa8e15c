// A message as ps-lite carries it.
#ifndef BYTEPS_CLUSTER_PS_MESSAGE_H_
#define BYTEPS_CLUSTER_PS_MESSAGE_H_

#include "byteps/base/config.h"
#include "byteps/cluster/channel.h"
#include "ps/internal/message.h"

namespace byteps {
namespace core {

// Shares the values.
ps::Message ToPs(const Message& message);

// What came to a node of this role.  Takes the body and the values over.
Message FromPs(ps::Message* message, Role here);
// What has come first.
MessageHead HeadOf(const ps::Meta& meta, Role here);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_CLUSTER_PS_MESSAGE_H_
