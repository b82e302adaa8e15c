// Where an endpoint receives what is written into its memory.
#include "byteps/net/rdma/inbox.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

namespace ps {
namespace rdma {
namespace {

constexpr uint64_t kBytes = 1000;
constexpr uint64_t kWindow = 2 * kBytes;

// Stands for a registration.
std::shared_ptr<Region> AnyRegion() {
  static char any;
  return std::shared_ptr<Region>(std::shared_ptr<void>(), reinterpret_cast<Region*>(&any));
}

class InboxTest : public testing::Test {
 protected:
  // One comes, whose value belongs at `place`, or wherever there is memory.
  void Come(uint32_t id, char* place = nullptr) {
    Incoming incoming;
    incoming.id = id;
    incoming.value_bytes = kBytes;
    incoming.sizes = {kBytes};
    incoming.place = place;
    inbox_.Wait(std::move(incoming));
  }
  // Finds memory for the first.
  void Clear() {
    ASSERT_TRUE(inbox_.MayClear(kWindow));
    inbox_.BeginClearing();
    EXPECT_FALSE(inbox_.MayClear(kWindow)) << "one thread at a time";
    Memory memory;
    if (char* place = inbox_.first()->place) {
      memory.bytes.reset(place, kBytes, [](char*) {});
      memory.region = AnyRegion();
    } else {
      memory.bytes = SArray<char>(kBytes);
    }
    inbox_.EndClearing(std::move(memory));
  }
  // Tells the sender of the next; returns the cookie.
  uint32_t Tell(uint32_t id) {
    uint32_t told = 0;
    const Target target = inbox_.Tell(&told);
    EXPECT_EQ(told, id);
    EXPECT_NE(target.address, 0u);
    return target.cookie;
  }

  Inbox inbox_;
  Incoming incoming_;
  std::string place_ = std::string(2 * kBytes, '-');
};

TEST_F(InboxTest, AsManyAtATimeAsTheWindowHolds) {
  for (const uint32_t id : {1, 2, 3}) Come(id);
  Clear();
  Clear();
  EXPECT_FALSE(inbox_.MayClear(kWindow));
  const uint32_t cookie = Tell(1);
  EXPECT_FALSE(inbox_.Take(cookie + 1, &incoming_)) << "its sender was not told";
  ASSERT_TRUE(inbox_.Take(cookie, &incoming_));
  EXPECT_EQ(incoming_.id, 1u);
  EXPECT_FALSE(inbox_.Take(cookie, &incoming_)) << "once";
  Clear();
  EXPECT_FALSE(inbox_.any_waits());
}

TEST_F(InboxTest, OneAloneMayBeLargerThanTheWindow) {
  Come(1);
  EXPECT_TRUE(inbox_.MayClear(1));
}

TEST_F(InboxTest, WhatIsGivenUpBeforeItsSenderIsToldGoesElsewhere) {
  Come(1, &place_[0]);
  Clear();
  EXPECT_TRUE(inbox_.IsWrittenTo(place_.data() + 10, 1));
  EXPECT_FALSE(inbox_.Abandon(place_.data() + kBytes, 1)) << "something else";
  EXPECT_TRUE(inbox_.Abandon(place_.data() + 10, 1));
  EXPECT_FALSE(inbox_.IsWrittenTo(place_.data(), kBytes));
  EXPECT_FALSE(inbox_.any_to_tell());
  Clear();
  ASSERT_TRUE(inbox_.Take(Tell(1), &incoming_));
  EXPECT_TRUE(incoming_.drop);
  EXPECT_EQ(incoming_.place, nullptr);
}

TEST_F(InboxTest, WhatIsGivenUpWhileItComesIsDropped) {
  Come(1, &place_[0]);
  Clear();
  const uint32_t cookie = Tell(1);
  EXPECT_FALSE(inbox_.Abandon(place_.data(), kBytes));
  EXPECT_TRUE(inbox_.IsWrittenTo(place_.data(), kBytes)) << "until all of it is there";
  ASSERT_TRUE(inbox_.Take(cookie, &incoming_));
  EXPECT_TRUE(incoming_.drop);
  EXPECT_FALSE(inbox_.IsWrittenTo(place_.data(), kBytes));
}

TEST_F(InboxTest, WhatIsGivenUpWhileItWaitsGetsOtherMemory) {
  Come(1, &place_[0]);
  EXPECT_FALSE(inbox_.Abandon(place_.data(), kBytes));
  Clear();
  EXPECT_FALSE(inbox_.IsWrittenTo(place_.data(), kBytes));
  ASSERT_TRUE(inbox_.Take(Tell(1), &incoming_));
  EXPECT_TRUE(incoming_.drop);
}

// It comes again over the next connection, and the memory of the last one counts no more.
TEST_F(InboxTest, WhatHadBegunToComeIsForgotten) {
  inbox_.Came();
  for (const uint32_t id : {1, 2, 3}) Come(id);
  Clear();
  const uint32_t cookie = Tell(1);
  Clear();
  inbox_.Forget();
  EXPECT_FALSE(inbox_.any_waits());
  EXPECT_FALSE(inbox_.any_to_tell());
  EXPECT_FALSE(inbox_.Take(cookie, &incoming_));
  EXPECT_EQ(inbox_.received(), 1u) << "messages that came whole still count";
  for (const uint32_t id : {1, 2}) Come(id);
  Clear();
  Clear();
}

}  // namespace
}  // namespace rdma
}  // namespace ps
