// Where a connection dials, and when next.
#include "byteps/net/link/dial_plan.h"

#include <gtest/gtest.h>

#include <chrono>

namespace ps {
namespace {

using std::chrono::milliseconds;

const DialPlan::Clock::time_point kStart{};
constexpr milliseconds kFirstPause{20};
constexpr milliseconds kLongestPause{500};

TEST(DialPlan, ALoneAddressIsTriedAgainAfterAPause) {
  DialPlan plan(kFirstPause, kLongestPause);
  plan.Begin({{"", "127.0.0.1"}}, 1234, kStart + std::chrono::seconds(5));
  EXPECT_EQ(plan.Current().to.Text(), "127.0.0.1:1234");
  for (const int ms : {20, 40, 80, 160, 320, 500, 500}) {
    EXPECT_EQ(plan.Failed("refused", true, kStart), kStart + milliseconds(ms));
  }
  EXPECT_EQ(plan.redial().last_error(), "refused");
  EXPECT_EQ(plan.deadline(), kStart + std::chrono::seconds(5));
}

TEST(DialPlan, OfALinkThatBrokeNothingIsKnown) {
  DialPlan plan(kFirstPause, kLongestPause);
  plan.Begin({{"", "127.0.0.1"}}, 1234, kStart);
  plan.Failed("refused", true, kStart);
  plan.Restart(false);
  EXPECT_FALSE(plan.redial().nobody_listens());
  EXPECT_EQ(plan.Failed("refused", true, kStart), kStart + milliseconds(20));
  plan.Succeeded(kStart);
  EXPECT_FALSE(plan.redial().nobody_listens());
}

// What a timer was set for, or a socket tells of, belongs to one attempt.
TEST(DialPlan, EachAttemptHasANumber) {
  DialPlan plan(kFirstPause, kLongestPause);
  plan.Begin({{"", "127.0.0.1"}}, 1234, kStart);
  const uint64_t first = plan.attempt();
  plan.NextAttempt();
  const uint64_t second = plan.attempt();
  plan.Failed("refused", true, kStart);
  EXPECT_NE(first, second);
  EXPECT_NE(second, plan.attempt());
}

// Two NICs, and what the kernel chooses.
DialPlan PlanOfPairs() {
  DialPlan plan(kFirstPause, kLongestPause);
  plan.Begin({{"127.0.0.1", "127.0.0.1"}, {"127.0.0.2", "127.0.0.2"}, {"", "127.0.0.1"}}, 1234,
             kStart);
  return plan;
}

TEST(DialPlan, PairsAreTriedOneAfterAnotherBeforeAPause) {
  DialPlan plan = PlanOfPairs();
  EXPECT_EQ(plan.Current().Text(), "127.0.0.1 to 127.0.0.1:1234");
  EXPECT_FALSE(plan.is_away());
  EXPECT_EQ(plan.Failed("no answer", false, kStart), kStart);
  EXPECT_EQ(plan.Current().Text(), "127.0.0.2 to 127.0.0.2:1234");
  EXPECT_TRUE(plan.is_away());
  EXPECT_EQ(plan.home().Text(), "127.0.0.1 to 127.0.0.1:1234");
  EXPECT_EQ(plan.Failed("no answer", false, kStart), kStart);
  EXPECT_EQ(plan.Current().Text(), "127.0.0.1:1234");
  EXPECT_EQ(plan.Failed("no answer", false, kStart), kStart + milliseconds(20));
  EXPECT_FALSE(plan.is_away());
}

// The peer is there, and not ready: another pair would find it no readier.
TEST(DialPlan, APeerThatAsksForPatienceIsTriedOverTheSamePair) {
  DialPlan plan = PlanOfPairs();
  plan.Failed("no answer", false, kStart);
  EXPECT_EQ(plan.Current().from, "127.0.0.2");
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(plan.Postponed("not yet", kStart), kStart + milliseconds(20));
    EXPECT_EQ(plan.Current().from, "127.0.0.2");
  }
}

TEST(DialPlan, OfASilentPairAnotherIsTriedFirst) {
  DialPlan plan = PlanOfPairs();
  plan.Restart(false);
  EXPECT_FALSE(plan.is_away());
  plan.Restart(true);
  EXPECT_EQ(plan.Current().from, "127.0.0.2");
  // A round of attempts has ended when all have had their turn.
  EXPECT_EQ(plan.Failed("no answer", false, kStart), kStart);
  EXPECT_EQ(plan.Failed("no answer", false, kStart), kStart);
  EXPECT_EQ(plan.Current().from, "127.0.0.1");
  EXPECT_EQ(plan.Failed("no answer", false, kStart), kStart + milliseconds(20));
  plan.GoHome();
  EXPECT_FALSE(plan.is_away());
}

TEST(DialPlan, ItLooksLessOftenWhileThePairFailsAgain) {
  DialPlan plan = PlanOfPairs();
  const auto look = [&](std::chrono::seconds home_for) {
    const auto begin = kStart + std::chrono::hours(1);
    plan.GoHome();
    plan.Succeeded(begin);
    plan.Restart(true);
    plan.Succeeded(begin + home_for);
    return plan.NextLook();
  };
  EXPECT_EQ(look(std::chrono::seconds(1)), std::chrono::seconds(1));
  EXPECT_EQ(look(std::chrono::seconds(1)), std::chrono::seconds(2));
  EXPECT_EQ(look(std::chrono::seconds(1)), std::chrono::seconds(4));
  EXPECT_EQ(look(std::chrono::seconds(100)), std::chrono::seconds(1)) << "it has lasted";
  for (int i = 0; i < 10; ++i) plan.NextLook();
  EXPECT_EQ(plan.NextLook(), std::chrono::seconds(64));
}

TEST(DialPlan, PairsThatAreAddedAreAsGoodAsTheFirst) {
  DialPlan plan(kFirstPause, kLongestPause);
  plan.Begin({{"", "127.0.0.1"}}, 1234, kStart);
  EXPECT_FALSE(plan.has_several_pairs());
  plan.Add({{"127.0.0.2", "127.0.0.2"}, {"", "127.0.0.1"}});
  EXPECT_TRUE(plan.has_several_pairs());
  plan.Restart(true);
  EXPECT_EQ(plan.Current().Text(), "127.0.0.2 to 127.0.0.2:1234");
  EXPECT_FALSE(plan.is_away());
  plan.Restart(true);
  EXPECT_EQ(plan.Current().Text(), "127.0.0.1:1234") << "what was there already is there once";
}

}  // namespace
}  // namespace ps
