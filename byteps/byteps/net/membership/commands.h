// Which control commands of membership a node may send, and to whom.
#ifndef BYTEPS_NET_MEMBERSHIP_COMMANDS_H_
#define BYTEPS_NET_MEMBERSHIP_COMMANDS_H_

#include <functional>
#include <set>
#include <string>

#include "byteps/base/mutex.h"
#include "ps/internal/message.h"

namespace ps {
namespace membership {

// How the LEAVE of a server begins that was told to end.
constexpr char kStopped[] = "stopped";

// Whether a node of role `from` may send this command to one of role `to`.  `body`: the message's.
bool MaySend(Control::Command command, Node::Role from, Node::Role to, const std::string& body);

// "JOB_END"
std::string NameOf(Control::Command command);

// Those that sent what they must not send.  Any thread.
class IgnoredSenders {
 public:
  // Warns of the first such message of each sender.  `name_of`: what the node of an id is called.
  void Add(const Message& msg, const std::function<std::string(int)>& name_of);
  // The ids will be those of others.
  void Clear();

 private:
  Mutex mu_;
  std::set<int> senders_ PS_GUARDED_BY(mu_);
};

}  // namespace membership
}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_COMMANDS_H_
