#ifndef BYTEPS_NET_LINK_REDIAL_H_
#define BYTEPS_NET_LINK_REDIAL_H_

#include <algorithm>
#include <chrono>
#include <string>

#include "byteps/base/awake_clock.h"
#include "byteps/net/link/link_outage.h"

namespace ps {

// Attempts to connect to one peer: the pauses between them, and whether the peer's listener is
// gone.
//
// Not thread-safe.
class Redial {
 public:
  using Clock = AwakeClock;

  // Each pause is twice as long as the previous one.
  Redial(Clock::duration first, Clock::duration longest)
      : first_(first), longest_(longest), pause_(first) {}

  // Starts over after an established link broke. Whether the peer still listens is then unknown.
  void Begin() {
    pause_ = first_;
    last_error_.clear();
    nobody_listens_ = false;
  }

  void Failed(const std::string& error, bool nobody_listens, Clock::time_point now) {
    if (nobody_listens && !nobody_listens_) gone_since_ = now;
    nobody_listens_ = nobody_listens;
    last_error_ = error;
  }
  // Makes the next pause the shortest, because the reason for the failure will soon be gone.
  void Hurry() { pause_ = first_; }
  void Succeeded() { nobody_listens_ = false; }

  // Returns the pause before the next attempt.
  Clock::duration NextPause() {
    const Clock::duration pause = pause_;
    pause_ = std::min(pause_ * 2, longest_);
    return pause;
  }

  // Result of the last attempt.
  bool nobody_listens() const { return nobody_listens_; }
  const std::string& last_error() const { return last_error_; }
  // Returns whether the process that listened at the peer's address has ended.
  bool IsListenerGone(Clock::time_point now) const {
    return nobody_listens_ && now - gone_since_ >= kListenerGoneTime;
  }

 private:
  const Clock::duration first_;
  const Clock::duration longest_;
  Clock::duration pause_;
  std::string last_error_;
  bool nobody_listens_ = false;
  Clock::time_point gone_since_;
};

}  // namespace ps
#endif  // BYTEPS_NET_LINK_REDIAL_H_
