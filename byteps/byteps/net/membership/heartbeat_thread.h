#ifndef BYTEPS_NET_MEMBERSHIP_HEARTBEAT_THREAD_H_
#define BYTEPS_NET_MEMBERSHIP_HEARTBEAT_THREAD_H_

#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "byteps/base/awake_clock.h"
#include "byteps/base/mutex.h"

namespace ps {

// Returns the time between two heartbeats.
double HeartbeatSeconds(double peer_timeout_s);

// Thread of a membership: sends heartbeats, looks for silent peers, runs due tasks, and feeds the
// process's StallWatch.
class HeartbeatThread {
 public:
  using Clock = AwakeClock;

  // Callbacks. The thread calls them without a lock.
  struct Tasks {
    // Returns the time at which to call `on_due`; time_point::max() if no task is planned. Returns
    // nothing if even heartbeats are not needed now. The thread then sleeps until Wake.
    std::function<std::optional<Clock::time_point>()> next_due;
    std::function<void(Clock::time_point now)> on_due;
    std::function<void(Clock::time_point now)> on_beat;
  };

  HeartbeatThread(double heartbeat_s, Tasks tasks);
  // Call Stop first, if Start was called.
  ~HeartbeatThread() = default;

  void Start();
  // Makes the thread ask next_due again, because its result has changed. Thread-safe; allowed
  // before Start and after Stop.
  void Wake();
  // Ends the thread. Returns when it has ended. The thread itself must not call this.
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

// Returns a prefix for the reason why another process is lost. It is "worker 1 (10.0.0.3) stood
// still for 40.0 s; " if this process, named `self`, recently stood still for long; otherwise "".
std::string StoodStill(const std::string& self, double peer_timeout_s);

}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_HEARTBEAT_THREAD_H_
