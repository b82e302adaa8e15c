#ifndef BYTEPS_NET_MEMBERSHIP_IGNORED_SENDERS_H_
#define BYTEPS_NET_MEMBERSHIP_IGNORED_SENDERS_H_

#include <functional>
#include <set>
#include <string>

#include "byteps/base/mutex.h"
#include "ps/internal/message.h"

namespace ps {
namespace membership {

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
#endif  // BYTEPS_NET_MEMBERSHIP_IGNORED_SENDERS_H_
