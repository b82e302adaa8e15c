#ifndef BYTEPS_BASE_AWAKE_CLOCK_H_
#define BYTEPS_BASE_AWAKE_CLOCK_H_

#include <chrono>

namespace ps {

// Clock that counts only time in which this process ran. Deadlines for other processes are measured
// by this clock.
//
// A process may be stopped (SIGSTOP, a debugger), swapped out, or its virtual machine paused or
// migrated. Messages then wait unread, and by a steady clock every peer would seem late afterwards.
// AwakeClock stands still during such a pause, and for a heartbeat more, in which the process reads
// waiting messages. So every deadline is put off by the length of the pause.
//
// The clock notices a pause by the lateness of a thread that should wake up often
// (StallWatch::Feeder). In a job, that is the membership's heartbeat thread. Without a job,
// AwakeClock is the steady clock.

struct AwakeClock {
  using duration = std::chrono::steady_clock::duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<AwakeClock>;
  static constexpr bool is_steady = false;  // it never goes back, but it may stand still

  // Returns the current time. Thread-safe.
  static time_point now();
};

}  // namespace ps
#endif  // BYTEPS_BASE_AWAKE_CLOCK_H_
