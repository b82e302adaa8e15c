// A clock that stands still while this process does, in time that the test plays.
#include "byteps/base/stall_watch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace ps {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class Stalls : public testing::Test {
 protected:
  // The feeding thread wakes up as it should.
  void Run(StallWatch::Duration time) {
    const StallWatch::Time end = now_ + time;
    while (now_ < end) {
      now_ = std::min(end, now_ + StallWatch::TickTime(kHeartbeat));
      watch_.Tick(now_);
    }
  }
  void StandStill(StallWatch::Duration time) { now_ += time; }
  StallWatch::Duration Awake() { return watch_.AwakeAt(now_).time_since_epoch(); }

  static constexpr StallWatch::Duration kHeartbeat = seconds(5);
  static constexpr StallWatch::Duration kTolerance = seconds(1);
  StallWatch watch_;
  StallWatch::Time now_{seconds(1000)};
};

TEST_F(Stalls, WithoutAThreadThatTellsItIsTheSteadyClock) {
  EXPECT_EQ(Awake(), seconds(1000));
  StandStill(seconds(40));
  EXPECT_EQ(Awake(), seconds(1040));
}

TEST_F(Stalls, TimePassesWhileTheProcessRuns) {
  watch_.Begin(kHeartbeat, now_);
  Run(seconds(100));
  EXPECT_EQ(Awake(), seconds(1100));
  StandStill(milliseconds(400));  // as a busy machine may do
  EXPECT_EQ(Awake(), seconds(1100) + milliseconds(400));
  Run(seconds(1));
  EXPECT_EQ(Awake(), seconds(1101) + milliseconds(400));
  EXPECT_EQ(watch_.StoodStill(seconds(1000), now_), seconds(0));
}

TEST_F(Stalls, APauseAndAHeartbeatDoNotCount) {
  watch_.Begin(kHeartbeat, now_);
  Run(seconds(10));
  StandStill(seconds(40));
  // Any thread may look first, before the one that tells.
  EXPECT_EQ(Awake(), seconds(1010) + kTolerance);
  watch_.Tick(now_);
  EXPECT_EQ(Awake(), seconds(1010) + kTolerance);
  Run(kHeartbeat);
  EXPECT_EQ(Awake(), seconds(1010) + kTolerance) << "what has come is read first";
  Run(seconds(7));
  EXPECT_EQ(Awake(), seconds(1017) + kTolerance);
}

TEST_F(Stalls, AShortPauseGivesAShortGrace) {
  watch_.Begin(kHeartbeat, now_);
  StandStill(kTolerance + milliseconds(100));
  watch_.Tick(now_);
  EXPECT_EQ(Awake(), seconds(1000) + kTolerance);
  Run(seconds(1));
  EXPECT_EQ(Awake(), seconds(1001) + kTolerance - milliseconds(100));
}

TEST_F(Stalls, ItTellsForHowLongItStoodStill) {
  watch_.Begin(kHeartbeat, now_);
  Run(seconds(3));
  StandStill(seconds(40));
  EXPECT_EQ(watch_.StoodStill(seconds(30), now_), seconds(40)) << "whichever thread asks first";
  Run(seconds(2));
  StandStill(seconds(3));  // the system may let it run for a moment in between
  watch_.Tick(now_);
  EXPECT_EQ(watch_.StoodStill(seconds(30), now_), seconds(40));
  Run(seconds(31));
  EXPECT_EQ(watch_.StoodStill(seconds(30), now_), seconds(0));
}

TEST_F(Stalls, NeverBack) {
  watch_.Begin(kHeartbeat, now_);
  auto last = Awake();
  for (int i = 0; i < 200; ++i) {
    if (i % 3 == 0) StandStill(milliseconds(37 * i));
    if (i % 7 == 0) {
      watch_.Tick(now_);
    } else {
      Run(milliseconds(100));
    }
    EXPECT_GE(Awake(), last);
    last = Awake();
  }
  watch_.End(now_);
  EXPECT_GE(Awake(), last);
}

// A reader that met half of a change would see the clock leap by a pause, or go back.
TEST_F(Stalls, ReadersSeeWholeChanges) {
  watch_.Begin(kHeartbeat, now_);
  constexpr StallWatch::Time kLater{seconds(1'000'000'000)};
  constexpr StallWatch::Duration kPause = seconds(100);
  // Of a pause, and of the time after it.
  constexpr StallWatch::Duration kCounted = 2 * kTolerance;
  std::atomic<int> pauses{0};
  std::atomic<bool> ended{false};
  std::atomic<int> leaps{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      StallWatch::Duration last{};
      while (!ended) {
        const auto read = watch_.AwakeAt(kLater).time_since_epoch();
        if (read > seconds(1000) + pauses.load() * kCounted + kPause / 2 || read < last) ++leaps;
        last = read;
      }
    });
  }
  for (; pauses < 300'000; ++pauses) {
    StandStill(kPause);
    watch_.Tick(now_);
    Run(kHeartbeat + kTolerance);
  }
  ended = true;
  for (auto& reader : readers) reader.join();
  EXPECT_EQ(leaps, 0);
}

}  // namespace
}  // namespace ps
