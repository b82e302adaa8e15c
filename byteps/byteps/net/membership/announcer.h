#ifndef BYTEPS_NET_MEMBERSHIP_ANNOUNCER_H_
#define BYTEPS_NET_MEMBERSHIP_ANNOUNCER_H_

#include <atomic>
#include <functional>
#include <string>

#include "byteps/net/membership/event.h"

namespace ps {

// Delivers the events of a job to this process. It checks that a job ends only once. Thread-safe.
class Announcer {
 public:
  using Listener = std::function<void(const MembershipEvent&)>;

  // `listener` gets the events; it may be empty.
  explicit Announcer(Listener listener);

  void Tell(const MembershipEvent& event);
  // Delivers a kFailed event. `next_generation`: see MembershipEvent.
  void TellFailure(const std::string& reason, int next_generation, const char* file, int line);

 private:
  const Listener listener_;
  std::atomic<bool> over_{false};  // whether the listener was told of the end
};

}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_ANNOUNCER_H_
