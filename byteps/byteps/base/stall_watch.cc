#include "byteps/base/stall_watch.h"

#include <algorithm>
#include <utility>

#include "byteps/base/awake_clock.h"

namespace ps {
namespace {

using std::chrono::milliseconds;

constexpr StallWatch::Duration kShortestTick = milliseconds(20);
constexpr StallWatch::Duration kLongestTick = milliseconds(500);
// Pause of a thread that waits for the time on a clock that may stand still.
constexpr StallWatch::Duration kLook = milliseconds(2);

}  // namespace

StallWatch* StallWatch::Get() {
  static auto* const watch = new StallWatch();
  return watch;
}

StallWatch::Duration StallWatch::TickTime(Duration heartbeat) {
  return std::clamp<Duration>(heartbeat / 5, kShortestTick, kLongestTick);
}

AwakeClock::time_point StallWatch::Bounds::Awake(Time now) const {
  const Time counted = std::min(now, until);
  return std::max(floor, AwakeClock::time_point(counted.time_since_epoch() - lost));
}

// Store writes the fields in one order, and this function reads them in the opposite order. So a
// reader that sees the new `until` also sees the new `lost`, and with the new `lost` the new
// `floor`. A reader that sees the new `lost` and the old `until` returns `floor`, the time of the
// change.
StallWatch::Bounds StallWatch::SharedBounds::Load() const {
  Bounds bounds;
  bounds.until = until_.load(std::memory_order_acquire);
  bounds.lost = lost_.load(std::memory_order_acquire);
  bounds.floor = floor_.load(std::memory_order_acquire);
  return bounds;
}

void StallWatch::SharedBounds::Store(const Bounds& bounds) {
  floor_.store(bounds.floor, std::memory_order_release);
  lost_.store(bounds.lost, std::memory_order_release);
  until_.store(bounds.until, std::memory_order_release);
}

void StallWatch::Begin(Duration heartbeat, Time now) {
  MutexLock lock(&mu_);
  if (feeders_++ > 0) return;
  heartbeat_ = heartbeat;
  // A busy machine wakes threads late, even if the process was not stopped.
  tolerance_ = 2 * TickTime(heartbeat);
  last_tick_ = now;
  bounds_.until = now + tolerance_;
  shared_.Store(bounds_);
}

void StallWatch::Tick(Time now) {
  MutexLock lock(&mu_);
  Note(now);
}

void StallWatch::End(Time now) {
  MutexLock lock(&mu_);
  Note(now);
  if (--feeders_ > 0) return;
  bounds_ = {};
  shared_.Store(bounds_);
}

void StallWatch::Note(Time now) {
  if (now <= last_tick_) return;
  bounds_.floor = bounds_.Awake(now);
  const Duration whole = now - last_tick_;
  const Duration pause = whole - tolerance_;
  last_tick_ = now;
  bounds_.until = now + tolerance_;
  if (pause > Duration::zero()) {
    bounds_.lost += pause + std::min(pause, heartbeat_);
    const bool again = now - whole - stall_.ended < heartbeat_;
    stall_.length = again ? std::max(stall_.length, whole) : whole;
    stall_.ended = now;
  }
  shared_.Store(bounds_);
}

AwakeClock::time_point StallWatch::AwakeAt(Time now) { return shared_.Load().Awake(now); }

StallWatch::Stall StallWatch::LastStall(Time now) {
  MutexLock lock(&mu_);
  if (feeders_ == 0) return {};
  Note(now);
  return stall_;
}

StallWatch::Duration StallWatch::StoodStill(Duration last, Time now) {
  const Stall stall = LastStall(now);
  return now - stall.ended <= last ? stall.length : Duration::zero();
}

StallWatch::Feeder::Feeder(double heartbeat_s)
    : heartbeat_(std::chrono::duration_cast<Duration>(std::chrono::duration<double>(heartbeat_s))) {
  Tick();
}

StallWatch::Feeder::~Feeder() { Rest(); }

void StallWatch::Feeder::Tick() {
  const auto now = std::chrono::steady_clock::now();
  if (std::exchange(rests_, false)) return Get()->Begin(heartbeat_, now);
  Get()->Tick(now);
}

void StallWatch::Feeder::Rest() {
  if (!std::exchange(rests_, true)) Get()->End(std::chrono::steady_clock::now());
}

StallWatch::Time StallWatch::Feeder::SleepUntil(AwakeClock::time_point wake) const {
  const auto now = std::chrono::steady_clock::now();
  const Duration left = wake - Get()->AwakeAt(now);
  return now + std::clamp<Duration>(left, kLook, TickTime(heartbeat_));
}

}  // namespace ps
