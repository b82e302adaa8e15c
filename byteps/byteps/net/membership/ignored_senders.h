#ifndef BYTEPS_NET_MEMBERSHIP_IGNORED_SENDERS_H_
#define BYTEPS_NET_MEMBERSHIP_IGNORED_SENDERS_H_

#include <functional>
#include <set>
#include <string>

#include "byteps/base/mutex.h"
#include "ps/internal/message.h"

namespace ps {
namespace membership {

// Nodes that have sent messages which they must not send. Thread-safe.
class IgnoredSenders {
 public:
  // Logs a warning for a sender's first such message. `name_of` names the node of an id.
  void Add(const Message& msg, const std::function<std::string(int)>& name_of);
  // Forgets all senders, since their ids will belong to other nodes.
  void Clear();

 private:
  Mutex mu_;
  std::set<int> senders_ PS_GUARDED_BY(mu_);
};

}  // namespace membership
}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_IGNORED_SENDERS_H_
