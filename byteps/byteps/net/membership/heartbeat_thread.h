#ifndef BYTEPS_NET_MEMBERSHIP_HEARTBEAT_THREAD_H_
#define BYTEPS_NET_MEMBERSHIP_HEARTBEAT_THREAD_H_

#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "byteps/base/awake_clock.h"
#include "byteps/base/mutex.h"

namespace ps {

// The rhythm in which scheduler and nodes hear of each other.

// Between two heartbeats.
double HeartbeatSeconds(double peer_timeout_s);

// The thread of a membership.  It sends heartbeats, looks for peers that are silent, does what is
// due at a certain time, and feeds the process's StallWatch.
class HeartbeatThread {
 public:
  using Clock = AwakeClock;

  // What the thread calls, with no lock held.
  struct Tasks {
    // When `on_due` is to be called; time_point::max(): not yet.  Nothing: the job is not watched
    // now, and the thread sleeps until Wake.
    std::function<std::optional<Clock::time_point>()> next_due;
    std::function<void(Clock::time_point now)> on_due;
    // At each heartbeat.
    std::function<void(Clock::time_point now)> on_beat;
  };

  HeartbeatThread(double heartbeat_s, Tasks tasks);
  // Stop was called, if Start was.
  ~HeartbeatThread() = default;

  void Start();
  // What next_due returns has changed.  Any thread, before Start and after Stop as well.
  void Wake();
  // Returns when the thread has ended; it must not be this one.
  void Stop();

 private:
  void Run();

  const double heartbeat_s_;
  const Tasks tasks_;
  Mutex mu_;
  CondVar cond_;
  bool woken_ PS_GUARDED_BY(mu_) = false;
  bool stopped_ PS_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

// What comes before the reason why another process is lost: "worker 1 (10.0.0.3) stood still for
// 40.0 s; " if this process, which is called `self`, did so a short while ago, and for long; empty
// otherwise.
std::string StoodStill(const std::string& self, double peer_timeout_s);

}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_HEARTBEAT_THREAD_H_
