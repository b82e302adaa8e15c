#ifndef BYTEPS_NET_LINK_REDIAL_H_
#define BYTEPS_NET_LINK_REDIAL_H_

#include <algorithm>
#include <chrono>
#include <string>

#include "byteps/base/awake_clock.h"
#include "byteps/net/link/link_outage.h"

namespace ps {

// Attempts to connect to one peer, until one comes to something: how long to wait before the next,
// and whether who listened there has gone.
//
// Of one thread.
class Redial {
 public:
  using Clock = AwakeClock;

  // Each pause is twice the one before.
  Redial(Clock::duration first, Clock::duration longest)
      : first_(first), longest_(longest), pause_(first) {}

  // A link broke that was there: nothing is known of who listens now.
  void Begin() {
    pause_ = first_;
    last_error_.clear();
    nobody_listens_ = false;
  }

  // An attempt has failed.
  void Failed(const std::string& error, bool nobody_listens, Clock::time_point now) {
    if (nobody_listens && !nobody_listens_) gone_since_ = now;
    nobody_listens_ = nobody_listens;
    last_error_ = error;
  }
  // What stands in the way will pass soon.
  void Hurry() { pause_ = first_; }
  // An attempt has come to something.
  void Succeeded() { nobody_listens_ = false; }

  // Before the next attempt.
  Clock::duration NextPause() {
    const Clock::duration pause = pause_;
    pause_ = std::min(pause_ * 2, longest_);
    return pause;
  }

  // Of the last attempt.
  bool nobody_listens() const { return nobody_listens_; }
  const std::string& last_error() const { return last_error_; }
  // Whether the process that listened there has ended.
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
