// In which order a connection's messages are written.
#include "byteps/net/tcp/send_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "byteps/base/error.h"

namespace ps {
namespace tcp {
namespace {

// A message of so many bytes, named by its key.
OutgoingPtr MessageOf(uint64_t key, size_t bytes) {
  Message msg;
  msg.meta.key = key;
  msg.data.emplace_back(bytes);
  return MakeMessage(msg);
}

constexpr size_t kLarge = 1 << 20;

class SendQueueTest : public testing::Test {
 protected:
  OutgoingPtr Push(size_t bytes) {
    all_.push_back(MessageOf(all_.size(), bytes));
    queue_.Push(all_.back());
    return all_.back();
  }

  // Takes a batch as if it were written, and returns its messages by number.
  std::vector<int> Take(uint64_t received = 0) {
    OutgoingList batch;
    queue_.TakeBatch(received, &batch);
    std::vector<int> numbers;
    for (const auto& outgoing : batch) {
      queue_.Written(outgoing->bytes);
      const auto at = std::find(all_.begin(), all_.end(), outgoing);
      numbers.push_back(static_cast<int>(at - all_.begin()));
    }
    return numbers;
  }

  using Numbers = std::vector<int>;

  SendQueue queue_;
  std::vector<OutgoingPtr> all_;
  OutgoingList arrived_;
};

TEST_F(SendQueueTest, FewBytesOvertakeManyThatHaveNotBegun) {
  Push(kLarge);
  Push(kLarge);
  Push(10);
  Push(10);
  EXPECT_EQ(Take(), Numbers({2, 3})) << "several by one call";
  EXPECT_EQ(Take(), Numbers({0}));
  Push(10);
  EXPECT_EQ(Take(), Numbers({4}));
  EXPECT_EQ(Take(), Numbers({1}));
  EXPECT_EQ(Take(), Numbers());
  EXPECT_EQ(queue_.bytes(), 0u);
}

TEST_F(SendQueueTest, BytesAreInFlightUntilTheyHaveArrived) {
  const size_t large = Push(kLarge)->bytes, small = Push(10)->bytes;
  EXPECT_EQ(queue_.bytes_in_flight(), 0u);
  Take();
  EXPECT_EQ(queue_.bytes_in_flight(), small);
  Take();
  EXPECT_EQ(queue_.bytes_in_flight(), small + large);
  queue_.Arrived(1, &arrived_);
  EXPECT_EQ(queue_.bytes_in_flight(), large);
  queue_.Resume(1, &arrived_);
  EXPECT_EQ(queue_.bytes_in_flight(), 0u) << "it waits to be sent again";
  Take();
  EXPECT_EQ(queue_.bytes_in_flight(), large);
  queue_.TakeAll();
  EXPECT_EQ(queue_.bytes_in_flight(), 0u);
}

TEST_F(SendQueueTest, NothingOvertakesAGoodbyeOfThisEnd) {
  Push(kLarge);
  all_.push_back(MakeFrame(kGoodbye));
  queue_.Push(all_.back());
  EXPECT_EQ(Take(), Numbers({0}));
  EXPECT_EQ(Take(), Numbers({1}));
}

TEST_F(SendQueueTest, EachFrameSaysWhatHasCome) {
  Push(10);
  Push(10);
  Take(77);
  for (const auto& outgoing : all_) {
    FrameHeader header;
    ASSERT_TRUE(DecodeFrameHeader(outgoing->head.data(), &header));
    EXPECT_EQ(header.received, 77u);
  }
}

TEST_F(SendQueueTest, WhatIsSentAgainGoesFirstAndInOrder) {
  Push(kLarge);
  Push(10);
  Take();
  Take();  // 1, then 0
  Push(20);
  EXPECT_EQ(queue_.Resume(0, &arrived_), 2u);
  EXPECT_EQ(queue_.bytes(), all_[0]->bytes + all_[1]->bytes + all_[2]->bytes);
  Push(30);
  EXPECT_EQ(Take(), Numbers({1}));
  EXPECT_EQ(Take(), Numbers({0}));
  EXPECT_EQ(Take(), Numbers({2, 3}));
}

// The second socket breaks when only some of what is sent again was sent again.
TEST_F(SendQueueTest, ABreakAmidWhatIsSentAgain) {
  for (int n = 0; n < 3; ++n) Push(kLarge);
  for (int n = 0; n < 3; ++n) Take();
  EXPECT_EQ(queue_.Resume(1, &arrived_), 2u);
  EXPECT_EQ(Take(), Numbers({1}));
  EXPECT_THROW(queue_.Arrived(3, &arrived_), Error) << "2 was not sent over this socket";
  EXPECT_EQ(queue_.Resume(1, &arrived_), 2u);
  EXPECT_EQ(Take(), Numbers({1}));
  EXPECT_EQ(Take(), Numbers({2}));
  queue_.Arrived(3, &arrived_);
  EXPECT_TRUE(queue_.all_arrived());
  EXPECT_EQ(arrived_, OutgoingList({all_[0], all_[1], all_[2]}));
}

// A frame without a message is of use for its socket alone, and no number counts it.
TEST_F(SendQueueTest, OnlyMessagesAreSentAgain) {
  all_.push_back(MakeFrame(kReceived));
  queue_.Push(all_.back());
  Push(10);
  EXPECT_EQ(Take(), Numbers({0, 1}));
  EXPECT_EQ(queue_.Resume(0, &arrived_), 1u);
  EXPECT_EQ(Take(), Numbers({1}));
  queue_.Arrived(1, &arrived_);
  EXPECT_TRUE(queue_.all_arrived());
}

TEST_F(SendQueueTest, AllIsLetGoOfWhereTheConnectionEnds) {
  for (const size_t bytes : {size_t{10}, kLarge, size_t{20}}) Push(bytes);
  Take();
  EXPECT_FALSE(queue_.all_arrived());
  EXPECT_EQ(queue_.TakeAll().size(), 3u);
  EXPECT_TRUE(queue_.empty());
  EXPECT_TRUE(queue_.all_arrived());
  EXPECT_EQ(queue_.bytes(), 0u);
}

TEST(VectorOf, GoesOnWhereWritingStopped) {
  const OutgoingList list = {MessageOf(1, 100), MessageOf(2, 200)};
  const size_t all = BytesOf(list);
  for (size_t done = 0; done <= all; ++done) {
    size_t left = 0;
    for (const iovec& piece : VectorOf(list, done)) {
      EXPECT_GT(piece.iov_len, 0u);
      left += piece.iov_len;
    }
    ASSERT_EQ(left, all - done);
  }
}

}  // namespace
}  // namespace tcp
}  // namespace ps
