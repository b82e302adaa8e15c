// What a greeting that failed means.
#include "byteps/net/link/greeting.h"

#include <gtest/gtest.h>

namespace ps {
namespace {

using Failure = GreetingFailure;

TEST(GreetingRule, OnALinkThatBrokeDamageCostsAnAttempt) {
  EXPECT_TRUE(IsOneMoreAttempt(Failure::kMaybeDamaged, true));
  EXPECT_FALSE(IsOneMoreAttempt(Failure::kMaybeDamaged, false)) << "settings differ";
}

TEST(GreetingRule, WhatTheOtherEndHasDecidedIsFinal) {
  EXPECT_FALSE(IsOneMoreAttempt(Failure::kDecided, true));
  EXPECT_FALSE(IsOneMoreAttempt(Failure::kDecided, false));
}

TEST(GreetingRule, WhatWillPassIsWaitedFor) {
  EXPECT_TRUE(IsOneMoreAttempt(Failure::kWillPass, true));
  EXPECT_TRUE(IsOneMoreAttempt(Failure::kWillPass, false));
}

}  // namespace
}  // namespace ps
