// When the next attempt to connect is made, and when there is none.
#include "byteps/net/link/redial.h"

#include <gtest/gtest.h>

namespace ps {
namespace {

using std::chrono::milliseconds;

const Redial::Clock::time_point kStart{};

TEST(Redial, EachPauseIsTwiceTheOneBefore) {
  Redial redial(milliseconds(20), milliseconds(70));
  for (const int ms : {20, 40, 70, 70}) EXPECT_EQ(redial.NextPause(), milliseconds(ms));
  redial.Hurry();
  EXPECT_EQ(redial.NextPause(), milliseconds(20));
  redial.Begin();
  EXPECT_EQ(redial.NextPause(), milliseconds(20));
}

TEST(Redial, AListenerIsGoneWhenNobodyHasListenedForAWhile) {
  Redial redial(milliseconds(20), milliseconds(70));
  redial.Failed("refused", true, kStart);
  EXPECT_TRUE(redial.nobody_listens());
  EXPECT_FALSE(redial.IsListenerGone(kStart)) << "it may be about to listen again";
  redial.Failed("refused", true, kStart + kListenerGoneTime / 2);
  EXPECT_TRUE(redial.IsListenerGone(kStart + kListenerGoneTime));
}

TEST(Redial, WhateverElseIsHeardShowsThatItIsThere) {
  Redial redial(milliseconds(20), milliseconds(70));
  redial.Failed("refused", true, kStart);
  redial.Failed("no answer", false, kStart + kListenerGoneTime / 2);
  EXPECT_FALSE(redial.IsListenerGone(kStart + kListenerGoneTime));
  redial.Failed("refused", true, kStart + kListenerGoneTime);
  EXPECT_FALSE(redial.IsListenerGone(kStart + kListenerGoneTime)) << "the time begins anew";
  redial.Succeeded();
  EXPECT_FALSE(redial.nobody_listens());
}

// Else a link that broke for the second time would be blamed on what its first outage suffered.
TEST(Redial, ALinkThatBreaksAgainForgetsWhatWasBefore) {
  Redial redial(milliseconds(20), milliseconds(70));
  redial.Failed("refused", true, kStart);
  EXPECT_EQ(redial.last_error(), "refused");
  redial.Begin();
  EXPECT_EQ(redial.last_error(), "");
  EXPECT_FALSE(redial.IsListenerGone(kStart + kListenerGoneTime));
}

}  // namespace
}  // namespace ps
