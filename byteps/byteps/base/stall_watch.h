#ifndef BYTEPS_BASE_STALL_WATCH_H_
#define BYTEPS_BASE_STALL_WATCH_H_

#include <atomic>
#include <chrono>

#include "byteps/base/awake_clock.h"
#include "byteps/base/mutex.h"

namespace ps {

// Notices that this process stood still, by the lateness of a thread that wakes up regularly. Times
// are passed in, for tests. Thread-safe.
class StallWatch {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Duration = AwakeClock::duration;

  // Returns this process's watch.
  static StallWatch* Get();

  // The thread calls Tick once in each TickTime(heartbeat), between Begin and End.
  void Begin(Duration heartbeat, Time now);
  void Tick(Time now);
  void End(Time now);
  static Duration TickTime(Duration heartbeat);

  AwakeClock::time_point AwakeAt(Time now);

  // Period in which this process stood still.
  struct Stall {
    Duration length{};
    Time ended;
  };
  // Returns the last stall, or a longer one that ended just before it. The length is zero if there
  // was no stall.
  Stall LastStall(Time now);
  // Returns the length of the last stall if it ended at most `last` before `now`; otherwise zero.
  Duration StoodStill(Duration last, Time now);

  // Reports a thread's wake-ups to this process's watch, as long as this object exists.
  class Feeder {
   public:
    explicit Feeder(double heartbeat_s);
    ~Feeder();
    Feeder(const Feeder&) = delete;
    Feeder& operator=(const Feeder&) = delete;

    // Reports that the thread has woken up.
    void Tick();
    // Reports that the thread begins to wait for an event, not for a time. Until the next Tick, a
    // late wake-up is no sign of a pause.
    void Rest();
    // Returns the time at which the thread must wake up, if it has nothing to do before `wake`.
    Time SleepUntil(AwakeClock::time_point wake) const;

   private:
    const Duration heartbeat_;
    bool rests_ = true;
  };

 private:
  // Data from which AwakeClock computes its time.
  struct Bounds {
    Time until = Time::max();      // steady time up to which stalls are known
    Duration lost{};               // steady time that was lost in stalls, and does not count
    AwakeClock::time_point floor;  // AwakeClock does not go below this time
    AwakeClock::time_point Awake(Time now) const;
  };

  // Lock-free for readers: sockets read the clock at each event.
  class SharedBounds {
   public:
    Bounds Load() const;
    void Store(const Bounds& bounds);  // Only one thread at a time may call this.

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
  SharedBounds shared_;             // equals bounds_
  Stall stall_ PS_GUARDED_BY(mu_);  // result of LastStall
};

}  // namespace ps
#endif  // BYTEPS_BASE_STALL_WATCH_H_
