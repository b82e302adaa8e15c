#ifndef BYTEPS_BASE_AWAKE_CLOCK_H_
#define BYTEPS_BASE_AWAKE_CLOCK_H_

#include <chrono>

namespace ps {

// Time in which this process ran, for deadlines on what others do.
//
// A process stands still when it is stopped (SIGSTOP, a debugger), when its virtual machine is
// paused or moved, or when it is swapped out.  Others go on meanwhile, and what they sent waits to
// be read.  Who then looks at a clock finds everybody else late.  AwakeClock is a clock that stood
// still as well: a deadline in it moves by the length of the pause, and by a heartbeat more, in
// which what has come meanwhile is read.
//
// A thread that wakes up often tells how late it is (StallWatch::Feeder): the membership's timer,
// as long as this process is in a job.  Outside of a job AwakeClock is the steady clock.

struct AwakeClock {
  using duration = std::chrono::steady_clock::duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<AwakeClock>;
  static constexpr bool is_steady = false;  // it never goes back, but it may stand

  // Any thread.
  static time_point now();
};

}  // namespace ps
#endif  // BYTEPS_BASE_AWAKE_CLOCK_H_
