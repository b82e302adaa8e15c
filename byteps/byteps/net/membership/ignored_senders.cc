#include "byteps/net/membership/ignored_senders.h"

#include "byteps/base/log.h"
#include "byteps/net/membership/membership.h"
#include "ps/internal/message.h"

namespace ps {
namespace membership {

void IgnoredSenders::Add(const Message& msg, const std::function<std::string(int)>& name_of) {
  const int sender = msg.meta.sender;
  {
    MutexLock lock(&mu_);
    if (!senders_.insert(sender).second) return;
  }
  BPS_LOG(WARNING)
      << "ignored " << NameOf(msg.meta.control.cmd) << " from " << name_of(sender)
      << ", which must not send it to this node; more of the kind from there is ignored "
         "without a warning";
}

void IgnoredSenders::Clear() {
  MutexLock lock(&mu_);
  senders_.clear();
}

}  // namespace membership
}  // namespace ps
