// When the other end is told what has come.
#include "byteps/net/link/receipts.h"

#include <gtest/gtest.h>

namespace ps {
namespace {

using Tell = Receipts::Tell;

TEST(Receipts, NothingIsToldWhereNothingCame) {
  Receipts receipts;
  EXPECT_EQ(receipts.Next(), Tell::kNothing);
  receipts.Came(100);
  receipts.Told(receipts.received());  // by a frame that was sent anyway
  EXPECT_EQ(receipts.Next(), Tell::kNothing);
}

TEST(Receipts, FewBytesAreToldSoonAndByOneFrame) {
  Receipts receipts;
  receipts.Came(100);
  EXPECT_EQ(receipts.Next(), Tell::kSoon);
  receipts.Came(100);
  EXPECT_EQ(receipts.Next(), Tell::kNothing) << "a frame is planned";
  EXPECT_TRUE(receipts.IsDue());
  receipts.Told(receipts.received());
  EXPECT_EQ(receipts.Next(), Tell::kNothing);
  receipts.Came(100);
  EXPECT_EQ(receipts.Next(), Tell::kSoon);
}

TEST(Receipts, WhatWasToldMeanwhileIsNotDue) {
  Receipts receipts;
  receipts.Came(100);
  EXPECT_EQ(receipts.Next(), Tell::kSoon);
  receipts.Told(1);
  EXPECT_FALSE(receipts.IsDue());
}

TEST(Receipts, ManyBytesOrMessagesAreToldAtOnce) {
  Receipts large;
  large.Came(Receipts::kManyBytes);
  EXPECT_EQ(large.Next(), Tell::kNow);
  Receipts many;
  for (uint64_t n = 0; n < Receipts::kManyMessages; ++n) many.Came(1);
  EXPECT_EQ(many.Next(), Tell::kNow);
}

TEST(Receipts, WhatWasToldAtOnceCountsNoMore) {
  Receipts receipts;
  receipts.Came(Receipts::kManyBytes);
  EXPECT_EQ(receipts.Next(), Tell::kNow);
  receipts.Told(1);
  receipts.Came(1);
  EXPECT_EQ(receipts.Next(), Tell::kSoon);
}

// Else a sender without room would wait for the time of a frame that is planned.
TEST(Receipts, ManyAreToldAtOnceThoughAFrameIsPlanned) {
  Receipts receipts;
  receipts.Came(1);
  EXPECT_EQ(receipts.Next(), Tell::kSoon);
  receipts.Came(Receipts::kManyBytes);
  EXPECT_EQ(receipts.Next(), Tell::kNow);
}

}  // namespace
}  // namespace ps
