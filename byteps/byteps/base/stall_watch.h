#ifndef BYTEPS_BASE_STALL_WATCH_H_
#define BYTEPS_BASE_STALL_WATCH_H_

#include <atomic>
#include <chrono>

#include "byteps/base/awake_clock.h"
#include "byteps/base/mutex.h"

namespace ps {

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

}  // namespace ps
#endif  // BYTEPS_BASE_STALL_WATCH_H_
