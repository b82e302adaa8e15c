// Where a connection dials, and when next.
#include "byteps/net/tcp/dial_plan.h"

#include <gtest/gtest.h>

#include <chrono>

namespace ps {
namespace tcp {
namespace {

using std::chrono::milliseconds;

const DialPlan::Clock::time_point kStart{};

TEST(DialPlan, ALoneAddressIsTriedAgainAfterAPause) {
  DialPlan plan;
  plan.Begin({{"", "127.0.0.1"}}, 1234, kStart + std::chrono::seconds(5));
  EXPECT_EQ(plan.Current().to.Text(), "127.0.0.1:1234");
  for (const int ms : {20, 40, 80, 160, 320, 500, 500}) {
    EXPECT_EQ(plan.Failed("refused", true, kStart), kStart + milliseconds(ms));
  }
  EXPECT_EQ(plan.redial().last_error(), "refused");
  EXPECT_EQ(plan.deadline(), kStart + std::chrono::seconds(5));
}

TEST(DialPlan, OfALinkThatBrokeNothingIsKnown) {
  DialPlan plan;
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
  DialPlan plan;
  plan.Begin({{"", "127.0.0.1"}}, 1234, kStart);
  const uint64_t first = plan.attempt();
  plan.NextAttempt();
  const uint64_t second = plan.attempt();
  plan.Failed("refused", true, kStart);
  EXPECT_NE(first, second);
  EXPECT_NE(second, plan.attempt());
}

}  // namespace
}  // namespace tcp
}  // namespace ps
