// What a process is told of itself: its clocks, the names of its threads, and its forks.
#ifndef BYTEPS_BASE_PROCESS_H_
#define BYTEPS_BASE_PROCESS_H_

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "byteps/base/mutex.h"

namespace byteps {
namespace core {

// The clock that intervals are measured by.

// Nanoseconds since some moment that all processes of a host share.
inline int64_t SteadyNs() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// Threads by name, for those who look at a process (top -H, perf, a debugger).

// "bps-" and `name` and, where there are several, `number`: 15 characters are shown.
inline void NameThisThread(const std::string& name, long number = -1) {
  const std::string text = "bps-" + name + (number < 0 ? "" : "/" + std::to_string(number));
  pthread_setname_np(pthread_self(), text.substr(0, 15).c_str());
}

}  // namespace core
}  // namespace byteps

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

// Any thread.  Times are given, so that tests can play them.
class StallWatch {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Duration = AwakeClock::duration;

  // That of this process.
  static StallWatch* Get();

  // A thread begins to call Tick each TickTime(heartbeat), and ends to.
  void Begin(Duration heartbeat, Time now);
  void Tick(Time now);
  void End(Time now);
  static Duration TickTime(Duration heartbeat);

  AwakeClock::time_point AwakeAt(Time now);

  // A time in which this process stood still.
  struct Stall {
    Duration length{};
    Time ended;
  };
  // The last one, or a longer one that ended just before it; of no length: there was none.
  Stall LastStall(Time now);
  // Its length, if it ended within `last`.
  Duration StoodStill(Duration last, Time now);

  // A thread that tells of its wake-ups, as long as this lives.
  class Feeder {
   public:
    explicit Feeder(double heartbeat_s);
    ~Feeder();
    Feeder(const Feeder&) = delete;
    Feeder& operator=(const Feeder&) = delete;

    // To be called when the thread wakes up.
    void Tick();
    // The thread waits for something else than time; ends with the next Tick.
    void Rest();
    // Until then the thread may sleep, if it wants to sleep until `wake`.
    Time SleepUntil(AwakeClock::time_point wake) const;

   private:
    const Duration heartbeat_;
    bool rests_ = true;
  };

 private:
  // What a reading of the clock needs.
  struct Bounds {
    Time until = Time::max();      // nobody has noticed yet what happened after that
    Duration lost{};               // steady time that did not count
    AwakeClock::time_point floor;  // it was as late as that already
    AwakeClock::time_point Awake(Time now) const;
  };

  // Sockets read the clock each time they are looked at, so readers take no lock.
  class SharedBounds {
   public:
    Bounds Load() const;
    void Store(const Bounds& bounds);  // one thread at a time

   private:
    std::atomic<Time> until_{Time::max()};
    std::atomic<Duration> lost_{Duration::zero()};
    std::atomic<AwakeClock::time_point> floor_{AwakeClock::time_point{}};
  };

  void Note(Time now) PS_REQUIRES(mu_);

  Mutex mu_;
  int feeders_ PS_GUARDED_BY(mu_) = 0;
  Duration heartbeat_ PS_GUARDED_BY(mu_){};
  Duration tolerance_ PS_GUARDED_BY(mu_){};
  Time last_tick_ PS_GUARDED_BY(mu_);
  Bounds bounds_ PS_GUARDED_BY(mu_);
  SharedBounds shared_;             // as bounds_
  Stall stall_ PS_GUARDED_BY(mu_);  // as LastStall has it
};

// What becomes of a transport's descriptors in a forked process.
//
// A forked child has a copy of each of them, and none of the threads that serve them.  With the
// copies open, peers do not hear of the parent's end before the child's.  So the child closes them
// before fork() returns.  What is started by exec is another matter: all are made with O_CLOEXEC.

// Whether this process was forked while its parent's transport was in use.  It may touch nothing of
// it then: locks may be held by threads that it does not have.
bool IsForkedCopy();

// While one exists, fork() waits, in whichever thread.  To be held for as long as it takes to make
// or close a descriptor; nothing is allocated meanwhile, since fork() may hold the allocator's
// locks.
class HoldForks {
 public:
  HoldForks();
  ~HoldForks();
  HoldForks(const HoldForks&) = delete;
  HoldForks& operator=(const HoldForks&) = delete;
};

// Forked children close this descriptor.  Under the HoldForks under which it was made.
void CloseInChild(int fd);

// They do no longer.  Under the HoldForks under which it is closed.
void KeepInChild(int fd);

// Forked children close a descriptor that a library owns, for as long as this lives.  It goes
// before the library closes it.
class ClosedInChild {
 public:
  explicit ClosedInChild(int fd) : fd_(fd) {
    const HoldForks hold;
    CloseInChild(fd_);
  }
  ~ClosedInChild() {
    const HoldForks hold;
    KeepInChild(fd_);
  }
  ClosedInChild(const ClosedInChild&) = delete;
  ClosedInChild& operator=(const ClosedInChild&) = delete;

 private:
  const int fd_;
};

}  // namespace ps

#endif  // BYTEPS_BASE_PROCESS_H_
