// Which control commands of membership a node may send, and to whom.
#ifndef BYTEPS_NET_MEMBERSHIP_COMMANDS_H_
#define BYTEPS_NET_MEMBERSHIP_COMMANDS_H_

#include <string>

#include "ps/internal/message.h"

namespace ps {
namespace membership {

// How the LEAVE of a server begins that was told to end.
constexpr char kStopped[] = "stopped";

// Whether a node of role `from` may send this command to one of role `to`.  `body`: the message's.
bool MaySend(Control::Command command, Node::Role from, Node::Role to, const std::string& body);

// "JOB_END"
std::string NameOf(Control::Command command);

}  // namespace membership
}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_COMMANDS_H_
