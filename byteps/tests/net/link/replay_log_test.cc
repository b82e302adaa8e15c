// Which messages are sent again over a link that broke.
#include "byteps/net/link/replay_log.h"

#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <random>
#include <vector>

namespace ps {
namespace {

using Message = std::unique_ptr<int>;
using Log = ReplayLog<Message>;

void Add(Log* log, const std::vector<int>& numbers) {
  for (const int n : numbers) log->Add(std::make_unique<int>(n));
}

template <typename List>
std::vector<int> NumbersOf(const List& list) {
  std::vector<int> numbers;
  for (const auto& message : list) numbers.push_back(*message);
  return numbers;
}

using Numbers = std::vector<int>;

TEST(ReplayLog, OnlyWhatThePeerLacksIsSentAgain) {
  Log log;
  std::vector<Message> arrived;
  Add(&log, {0, 1, 2, 3, 4});
  log.Arrived(1, &arrived);
  EXPECT_EQ(NumbersOf(arrived), Numbers({0}));
  const auto again = log.Resume(3, &arrived);  // two more had come, of which this end did not hear
  EXPECT_EQ(NumbersOf(arrived), Numbers({0, 1, 2}));
  EXPECT_EQ(NumbersOf(again), Numbers({3, 4}));
  EXPECT_TRUE(log.empty());
  EXPECT_EQ(log.sent(), 3u);
}

// A peer that counts wrongly would lose a message without a word, or get one twice.
TEST(ReplayLog, WhatCannotBeIsSaidAndChangesNothing) {
  Log log;
  std::vector<Message> arrived;
  Add(&log, {0, 1, 2, 3, 4});
  log.Arrived(4, &arrived);
  for (const uint64_t impossible : {6, 3}) {  // more than were sent; less than it said before
    EXPECT_THROW(log.Arrived(impossible, &arrived), Error);
    EXPECT_THROW(log.Resume(impossible, &arrived), Error);
  }
  EXPECT_EQ(arrived.size(), 4u);
  EXPECT_EQ(NumbersOf(log.Resume(4, &arrived)), Numbers({4}));
}

// The second link breaks when some of what is sent again was sent again: the rest stays behind it.
TEST(ReplayLog, ABreakAmidWhatIsSentAgain) {
  Log log;
  std::vector<Message> arrived;
  Add(&log, {0, 1, 2, 3});
  auto again = log.Resume(1, &arrived);
  log.Add(std::move(again.front()));
  again.pop_front();
  EXPECT_THROW(log.Arrived(3, &arrived), Error) << "that one was not sent over this link";
  auto first = log.Resume(1, &arrived);
  EXPECT_EQ(NumbersOf(first), Numbers({1}));
  EXPECT_EQ(NumbersOf(again), Numbers({2, 3}));
  EXPECT_EQ(log.sent(), 1u);
}

// A device completes a small message before the values of one that was begun earlier, and the next
// one does not.
TEST(ReplayLog, AnotherOrderOverTheNextLink) {
  Log log;
  std::vector<Message> arrived;
  Add(&log, {0, 1, 2});
  auto again = log.Resume(1, &arrived);
  for (auto it = again.rbegin(); it != again.rend(); ++it) log.Add(std::move(*it));
  EXPECT_EQ(NumbersOf(log.Resume(2, &arrived)), Numbers({1}));
  EXPECT_EQ(NumbersOf(arrived), Numbers({0, 2}));
}

TEST(ReplayLog, OneThatIsSentAgainCountsOnce) {
  Log log;
  std::vector<Message> arrived;
  for (int n = 0; n < 3; ++n) {
    Add(&log, {n});
    auto again = log.Resume(n, &arrived);
    for (auto& message : again) log.Add(std::move(message));
    log.Arrived(n + 1, &arrived);
    EXPECT_EQ(log.sent(), n + 1u);
    EXPECT_EQ(log.arrived(), n + 1u);
  }
  EXPECT_EQ(NumbersOf(arrived), Numbers({0, 1, 2}));
}

TEST(ReplayLog, WhatIsInFlightIsTakenWhereALinkEnds) {
  Log log;
  std::vector<Message> arrived;
  Add(&log, {0, 1, 2});
  log.Arrived(1, &arrived);
  EXPECT_EQ(NumbersOf(log.TakeAll()), Numbers({1, 2}));
  EXPECT_TRUE(log.empty());
}

// A sender and a receiver over a link that delivers in order, and breaks at random.  The sender
// hears of any part of what has come, and of no more.
TEST(ReplayLog, EachComesOnceAndInOrderHoweverOftenItBreaks) {
  std::mt19937 random(7);
  for (int run = 0; run < 300; ++run) {
    const int count = 1 + static_cast<int>(random() % 60);
    std::deque<Message> outbox;
    for (int n = 0; n < count; ++n) outbox.push_back(std::make_unique<int>(n));
    Log log;
    std::vector<Message> arrived;
    std::deque<int> link;  // what it carries now
    std::vector<int> received;
    while (received.size() < static_cast<size_t>(count)) {
      const auto what = random() % 4;
      if (what == 0 && !outbox.empty()) {
        link.push_back(*outbox.front());
        log.Add(std::move(outbox.front()));
        outbox.pop_front();
      } else if (what == 1 && !link.empty()) {
        received.push_back(link.front());
        link.pop_front();
      } else if (what == 2) {
        const uint64_t unheard = received.size() - log.arrived();
        log.Arrived(log.arrived() + random() % (unheard + 1), &arrived);
      } else if (what == 3 && random() % 4 == 0) {
        link.clear();
        auto again = log.Resume(received.size(), &arrived);
        for (auto it = again.rbegin(); it != again.rend(); ++it) {
          outbox.push_front(std::move(*it));
        }
      }
    }
    for (int n = 0; n < count; ++n) ASSERT_EQ(received[n], n) << "run " << run;
    log.Arrived(count, &arrived);
    EXPECT_EQ(arrived.size(), static_cast<size_t>(count)) << "each is let go of once";
  }
}

}  // namespace
}  // namespace ps
