#ifndef BYTEPS_NET_MEMBERSHIP_ANNOUNCER_H_
#define BYTEPS_NET_MEMBERSHIP_ANNOUNCER_H_

#include <atomic>
#include <functional>
#include <string>

#include "byteps/net/membership/event.h"

namespace ps {

// Hands a job's events to its process.  Any thread.  Checks that a job ends once.
class Announcer {
 public:
  using Listener = std::function<void(const MembershipEvent&)>;

  // Without a listener nobody is told.
  explicit Announcer(Listener listener);

  void Tell(const MembershipEvent& event);
  // A kFailed.  `next_incarnation`: see MembershipEvent.
  void TellFailure(const std::string& reason, int next_incarnation, const char* file, int line);

 private:
  const Listener listener_;
  std::atomic<bool> over_{false};  // the listener has heard of the end
};

}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_ANNOUNCER_H_
