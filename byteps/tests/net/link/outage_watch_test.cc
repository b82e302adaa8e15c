// How long a link may be broken, over as many connections as it takes.
#include "byteps/net/link/outage_watch.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace ps {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = OutageWatch::Clock;

constexpr double kReconnectS = 30;
const Clock::duration kNone = Clock::duration::zero();

class OutageWatchTest : public testing::Test {
 protected:
  bool Break(Clock::duration patience, Clock::duration counted = kNone) {
    return watch_.Begin("it broke", LinkFault::kBroken, true, patience, counted);
  }
  // How long there is from now, to the second.
  int64_t Left() const {
    return std::chrono::round<seconds>(watch_.deadline() - Clock::now()).count();
  }

  OutageWatch watch_{kReconnectS};
};

TEST_F(OutageWatchTest, ThePatienceIsLessWhatHasPassedInSilence) {
  EXPECT_TRUE(Break(seconds(30), seconds(15)));
  EXPECT_EQ(Left(), 15);
  EXPECT_TRUE(watch_.lasts());
  EXPECT_EQ(watch_.number(), 1u);
}

// The scheduler gives a node five seconds: when it is there again, it lives, and may take as long
// as any to send what is missing.
TEST_F(OutageWatchTest, APeerThatIsThereAgainHasAllTheTime) {
  Break(seconds(5));
  EXPECT_EQ(Left(), 5);
  watch_.AwaitProof(3);
  EXPECT_EQ(Left(), 30);
  EXPECT_EQ(watch_.again(), 3u);
  EXPECT_LT(watch_.End(), seconds(1));
  EXPECT_FALSE(watch_.lasts());
  EXPECT_FALSE(watch_.awaits_proof());
}

// Where a path carries greetings and nothing larger, each connection comes and breaks: the outage
// must end all the same.
TEST_F(OutageWatchTest, AConnectionThatProvesNothingDoesNotEndIt) {
  EXPECT_TRUE(Break(seconds(10)));
  watch_.AwaitProof(1);
  const auto deadline = watch_.deadline();
  for (int n = 0; n < 5; ++n) {
    EXPECT_FALSE(Break(seconds(30))) << "the same deadline";
    EXPECT_EQ(watch_.deadline(), deadline);
    watch_.AwaitProof(1);
    EXPECT_EQ(watch_.deadline(), deadline);
  }
  EXPECT_EQ(watch_.number(), 1u);
  // But one that has proved something begins another one.
  watch_.End();
  EXPECT_TRUE(Break(seconds(60)));
  EXPECT_GT(watch_.deadline(), deadline);
}

TEST_F(OutageWatchTest, AnEarlierDeadlineCounts) {
  EXPECT_TRUE(Break(seconds(30)));
  watch_.AwaitProof(0);
  EXPECT_TRUE(Break(seconds(5))) << "of a peer that has ended, it seems";
  EXPECT_EQ(Left(), 5);
  EXPECT_EQ(watch_.number(), 2u);
}

// A link of 5 kB/s takes long for a message: what comes over each connection keeps it alive.
TEST_F(OutageWatchTest, WhatCameOverTheLastConnectionCounts) {
  Break(seconds(5), seconds(3));
  watch_.AwaitProof(1);
  EXPECT_EQ(Left(), 27);
  EXPECT_FALSE(Break(seconds(30)));
  watch_.HearProofOfTheLast();
  watch_.AwaitProof(1);
  EXPECT_EQ(Left(), 30);
}

TEST_F(OutageWatchTest, NothingIsProvedOfAnOutageThatBegins) {
  Break(seconds(5), seconds(3));
  watch_.HearProofOfTheLast();  // there was none
  watch_.AwaitProof(1);
  EXPECT_EQ(Left(), 27);
}

TEST_F(OutageWatchTest, AConnectionThatIsThereSinceAMomentHasItsChance) {
  Break(seconds(30));
  watch_.AwaitProof(0);
  const auto chance = watch_.ChanceUntil();
  EXPECT_EQ(std::chrono::round<seconds>(chance - Clock::now()), seconds(5));
  watch_.PostponeTo(chance);
  EXPECT_EQ(Left(), 5);
  OutageWatch impatient{2};
  impatient.Begin("it broke", LinkFault::kBroken, true, seconds(2), kNone);
  impatient.AwaitProof(0);
  EXPECT_LE(impatient.ChanceUntil() - Clock::now(), milliseconds(500));
}

TEST_F(OutageWatchTest, SaysWhatWasNotAcknowledged) {
  Break(seconds(30));
  watch_.AwaitProof(1);
  watch_.NoteUnacknowledged(5000);
  watch_.NoteUnacknowledged(100);
  EXPECT_FALSE(Break(seconds(30)));
  EXPECT_NE(watch_.GivenUp(false, "").find("of 5000 bytes"), std::string::npos);
  EXPECT_EQ(watch_.GivenUp(true, "nobody listens"), "it broke");
  watch_.End();
  EXPECT_TRUE(Break(seconds(30)));
  EXPECT_EQ(watch_.GivenUp(false, "").find("acknowledged"), std::string::npos);
}

// The end that waits for answers gives up first, with nothing of its own on the way.
TEST_F(OutageWatchTest, OneThatIsRefusedSaysWhatWasNotAcknowledged) {
  Break(seconds(30));
  watch_.AwaitProof(1);
  EXPECT_EQ(watch_.Refused("it was refused"), "it was refused");
  watch_.NoteUnacknowledged(5000);
  const std::string text = watch_.Refused("it was refused");
  EXPECT_EQ(text.find("it was refused; of 5000 bytes"), 0u) << text;
  EXPECT_NE(text.find("compare the MTU"), std::string::npos) << text;
}

}  // namespace
}  // namespace ps
