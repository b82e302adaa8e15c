// Tests of the choice of signalled requests, and of the effects of completions.
#include "byteps/net/rdma/posted_sends.h"

#include <gtest/gtest.h>

#include <deque>
#include <random>
#include <string>
#include <vector>

namespace ps {
namespace rdma {
namespace {

constexpr uint64_t kWindow = 1 << 20;
constexpr uint32_t kPiece = kWindow / 4;

PostedSends::Request Frame(bool ends_message, uint64_t key = 0) {
  PostedSends::Request request;
  request.type = 1;
  request.key = key;
  request.ends_message = ends_message;
  return request;
}

PostedSends::Request Write(uint32_t bytes, bool ends_message, bool is_large) {
  PostedSends::Request request;
  request.bytes = bytes;
  request.ends_message = ends_message;
  request.is_large = is_large;
  return request;
}

class PostedSendsTest : public testing::Test {
 protected:
  bool Post(const PostedSends::Request& request) {
    const bool signalled = sends_.MustSignal(request);
    sends_.Add(request, signalled);
    return signalled;
  }
  // Posts requests; returns which were signalled: "!...!".
  std::string PostMany(int count, const PostedSends::Request& request) {
    std::string signalled;
    for (int n = 0; n < count; ++n) signalled += Post(request) ? '!' : '.';
    return signalled;
  }
  uint64_t last() const { return sends_.next() - 1; }
  uint64_t Retire(uint64_t number) {
    EXPECT_TRUE(sends_.Retire(number, &retired_));
    return retired_.messages;
  }

  PostedSends sends_{64, kWindow};
  PostedSends::Retired retired_;
};

TEST_F(PostedSendsTest, OneOfSixteenIsSignalled) {
  EXPECT_EQ(PostMany(40, Frame(true)), "!...............!...............!.......");
}

TEST_F(PostedSendsTest, AndFramesThatEndNoMessageAreCounted) {
  EXPECT_EQ(PostMany(33, Frame(false)), "...............!...............!.");
  EXPECT_EQ(Retire(32), 0u);
  EXPECT_FALSE(sends_.Watch()) << "nobody waits for them";
  EXPECT_FALSE(sends_.EndWatch());
}

TEST_F(PostedSendsTest, AFullQueueHasASignalledRequest) {
  for (const uint32_t depth : {4u, 5u, 7u, 8u, 15u, 16u, 17u, 64u, 65535u}) {
    PostedSends sends(depth, kWindow);
    uint32_t count = 0, signalled = 0;
    while (sends.has_room()) {
      const bool one = sends.MustSignal(Frame(false));
      sends.Add(Frame(false), one);
      ++count;
      signalled += one ? 1 : 0;
    }
    EXPECT_EQ(count, depth);
    // The queue gets room before it is empty, because several requests are signalled.
    EXPECT_GE(signalled, 3u) << depth;
    sends.Add({}, true);  // the request without effect fits too
    PostedSends::Retired retired;
    ASSERT_TRUE(sends.Retire(depth + 1, &retired));
    EXPECT_TRUE(sends.empty());
  }
}

TEST_F(PostedSendsTest, ACompletionTellsOfAllBefore) {
  PostMany(3, Frame(true));
  Post(Frame(false));
  Post(Frame(true, 77));
  EXPECT_EQ(Retire(1), 1u);
  EXPECT_EQ(Retire(5), 3u) << "2, 3 and 5";
  EXPECT_EQ(retired_.last.key, 77u);
  EXPECT_TRUE(sends_.empty());
  EXPECT_FALSE(sends_.Retire(5, &retired_)) << "once";
  EXPECT_EQ(retired_.messages, 0u);
  EXPECT_FALSE(sends_.Retire(6, &retired_)) << "it was not posted";
}

TEST_F(PostedSendsTest, ASlotIsUsedAgainWhenItsRequestIsOver) {
  PostedSends sends(8, kWindow);
  std::vector<int> users(8);
  for (int round = 0; round < 20; ++round) {
    while (sends.has_room()) {
      EXPECT_EQ(users.at(sends.next_slot())++, round);
      sends.Add(Frame(false), false);
    }
    PostedSends::Retired retired;
    EXPECT_TRUE(sends.Retire(sends.next() - 1, &retired));
  }
}

TEST_F(PostedSendsTest, HalfAWindowIsSignalled) {
  EXPECT_FALSE(Post(Frame(false))) << "the RTS";
  EXPECT_FALSE(Post(Write(kPiece, false, true)));
  EXPECT_TRUE(Post(Write(kPiece, false, true)));
  EXPECT_FALSE(Post(Write(kPiece, false, true)));
  EXPECT_EQ(sends_.bytes(), 3u * kPiece);
  EXPECT_TRUE(Post(Write(kPiece, true, true)));
  EXPECT_EQ(sends_.bytes(), kWindow);
  EXPECT_EQ(Retire(3), 0u);
  EXPECT_EQ(sends_.bytes(), kWindow / 2);
  EXPECT_EQ(Retire(5), 1u);
  EXPECT_EQ(sends_.bytes(), 0u);
}

TEST_F(PostedSendsTest, TheEndOfALargeValueIsSignalled) {
  PostMany(2, Frame(true));
  EXPECT_FALSE(Post(Write(5000, true, false)));
  EXPECT_TRUE(Post(Write(kPiece / 2, true, true)));
}

// An unsignalled message's arrival would be known only after another message, or never.
TEST_F(PostedSendsTest, TheOnlyMessageIsSignalled) {
  for (int n = 0; n < 40; ++n) {
    EXPECT_FALSE(Post(Frame(false)));
    EXPECT_TRUE(Post(Frame(true)));
    EXPECT_EQ(Retire(last()), 1u);
    EXPECT_TRUE(sends_.Watch());
    EXPECT_FALSE(sends_.EndWatch()) << "nothing was sent meanwhile";
  }
}

TEST_F(PostedSendsTest, TheLastMessagesAreAskedFor) {
  EXPECT_EQ(PostMany(5, Frame(true)), "!....");
  EXPECT_FALSE(sends_.Watch()) << "the first will tell";
  EXPECT_EQ(Retire(1), 1u);
  EXPECT_TRUE(sends_.Watch());
  EXPECT_FALSE(Post(Frame(true))) << "it will be asked for with the others";
  EXPECT_TRUE(sends_.EndWatch());
  sends_.Add({}, true);
  EXPECT_FALSE(sends_.EndWatch()) << "it has been asked for";
  EXPECT_EQ(Retire(last()), 5u);
  EXPECT_TRUE(sends_.Watch());
  EXPECT_FALSE(sends_.EndWatch());
  EXPECT_FALSE(sends_.Watch()) << "nothing has come since";
  EXPECT_TRUE(Post(Frame(true))) << "nobody is looking any more";
}

// Requests alternate with answers, so each is the only one in flight.
TEST_F(PostedSendsTest, WhileItIsWatchedOneOfSixteenIsSignalled) {
  EXPECT_TRUE(Post(Frame(true)));
  EXPECT_EQ(Retire(1), 1u);
  EXPECT_TRUE(sends_.Watch());
  EXPECT_EQ(PostMany(15, Frame(true)), "...............");
  EXPECT_TRUE(sends_.Watch()) << "the watch goes on";
  EXPECT_TRUE(Post(Frame(true)));
  EXPECT_FALSE(sends_.EndWatch()) << "the last will tell";
  EXPECT_FALSE(Post(Frame(true)));
  EXPECT_EQ(Retire(17), 16u);
  EXPECT_TRUE(sends_.Watch());
  EXPECT_TRUE(sends_.EndWatch());
}

// A device reports each request that it returns, whether signalled or not. The last report covers
// unsignalled requests that were completed.
TEST_F(PostedSendsTest, AStoppedQueueIsAccountedFor) {
  EXPECT_EQ(PostMany(4, Frame(true)), "!...");
  Post(Write(1000, false, false));
  EXPECT_TRUE(sends_.ends_unsignalled());
  sends_.SignalAll();
  EXPECT_TRUE(sends_.ends_unsignalled());
  sends_.Add({}, true);
  EXPECT_FALSE(sends_.ends_unsignalled());
  EXPECT_TRUE(Post(Frame(true))) << "nobody would ask again";
  EXPECT_EQ(Retire(3), 3u) << "failed, and is not signalled";
  EXPECT_EQ(Retire(7), 2u);
  EXPECT_TRUE(sends_.empty());
  EXPECT_EQ(sends_.bytes(), 0u);
  EXPECT_FALSE(sends_.ends_unsignalled());
}

TEST_F(PostedSendsTest, WhatFailedIsNotWaitedFor) {
  EXPECT_EQ(PostMany(3, Frame(true)), "!..");
  EXPECT_FALSE(Post(Write(1000, false, false)));
  EXPECT_EQ(Retire(4), 3u);
  EXPECT_FALSE(sends_.EndWatch());
  EXPECT_FALSE(sends_.ends_unsignalled()) << "it is over";
  EXPECT_TRUE(Post(Frame(true)));
  EXPECT_EQ(PostMany(15, Frame(true)), "...............") << "counted from there";
  EXPECT_TRUE(Post(Frame(true)));
}

// A simulated device. It completes requests in order, at any time, and reports only signalled ones.
// When it is stopped, it returns the remaining requests.
class Device {
 public:
  explicit Device(PostedSends* sends) : sends_(sends) {}

  void Post(const PostedSends::Request& request, bool signalled) {
    queue_.push_back({sends_->next(), signalled});
    sends_->Add(request, signalled);
  }
  // Returns whether it reported a completion.
  bool CompleteOne(uint64_t* messages) {
    const auto [number, signalled] = queue_.front();
    queue_.pop_front();
    if (signalled) Tell(number, messages);
    return signalled;
  }
  void GiveBack(bool tells_of_all, uint64_t* messages) {
    for (const auto& [number, signalled] : queue_) {
      if (signalled || tells_of_all) Tell(number, messages);
    }
    queue_.clear();
  }
  bool idle() const { return queue_.empty(); }

 private:
  void Tell(uint64_t number, uint64_t* messages) {
    PostedSends::Retired retired;
    EXPECT_TRUE(sends_->Retire(number, &retired));
    *messages += retired.messages;
  }

  PostedSends* const sends_;
  std::deque<std::pair<uint64_t, bool>> queue_;
};

TEST(PostedSends, HoweverADeviceWorks) {
  for (unsigned seed = 0; seed < 2000; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&random](uint32_t bound) { return random() % bound; };
    const uint32_t depth = 4 + below(40);
    PostedSends sends(depth, kWindow);
    Device device(&sends);
    uint64_t sent = 0, heard = 0;
    bool watched = false;
    const auto complete = [&] {
      // The polling thread makes the same steps when it wakes up.
      if (device.CompleteOne(&heard) && sends.Watch()) watched = true;
    };
    const auto ask = [&] {
      watched = false;
      if (sends.EndWatch()) device.Post({}, true);
    };
    for (int step = 0; step < 200; ++step) {
      const uint32_t what = below(10);
      if (what == 0 && watched) ask();
      if (what < 5) {
        if (!device.idle()) complete();
        continue;
      }
      PostedSends::Request request = Frame(what < 8);
      if (what == 9) request = Write(1 + below(kPiece), below(2) == 0, below(2) == 0);
      if (sends.bytes() + request.bytes > kWindow || !sends.has_room()) {
        // A completion must report room, even if nothing more is posted.
        const uint64_t bytes = sends.bytes();
        while (!device.idle()) complete();
        ASSERT_TRUE(sends.has_room()) << seed;
        ASSERT_TRUE(bytes + request.bytes <= kWindow || sends.bytes() < bytes) << seed;
        continue;
      }
      device.Post(request, sends.MustSignal(request));
      sent += request.ends_message ? 1 : 0;
    }
    if (seed % 2 == 0) {  // nothing more is sent
      while (!device.idle() || watched) {
        if (!device.idle()) complete();
        if (device.idle() && watched) ask();
      }
      ASSERT_EQ(heard, sent) << seed;
    }
    sends.SignalAll();
    if (sends.ends_unsignalled()) device.Post({}, true);
    device.GiveBack(seed % 3 == 0, &heard);
    ASSERT_TRUE(sends.empty()) << seed;
    ASSERT_EQ(sends.bytes(), 0u) << seed;
    ASSERT_EQ(heard, sent) << seed;
  }
}

}  // namespace
}  // namespace rdma
}  // namespace ps
