// The server's rounds: which of them fail, and when.
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "byteps/base/protocol.h"
#include "byteps/base/stall_watch.h"
#include "tests/server/server_fixture.h"

namespace byteps {
namespace core {
namespace {

// The thread that receives a small partition's last push finds the engine idle, and sends the sum.
TEST_F(ServerTest, SmallSumsAreSentByWhoBringsThem) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  size_t answers = 2;
  for (uint32_t round = 0;; ++round) {
    Push(0, 0, round, kLong);
    Push(1, 0, round, kLong);
    const auto all = answers_.Await(answers += 2);
    ASSERT_EQ(all.size(), answers);
    EXPECT_EQ(all.back().values, std::vector<float>(4, 3));
    if (all.back().sent_by == std::this_thread::get_id()) return;
    // The engine may be handling an earlier deadline at this moment.
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
  }
}

// The tensor asks for the order, not the server. The loss of 1 next to 2^80 depends on the order.
TEST_F(ServerTest, ValuesAreAddedInTheOrderOfRanksIfTheTensorSaysSo) {
  constexpr float kHuge = 0x1p80f;
  declaration_.group = {0, 1, 2};
  declaration_.average = false;
  for (const bool in_order : {false, true}) {
    declaration_.name = in_order ? "in order" : "as they come";
    declaration_.in_order = in_order;
    for (int rank : {0, 1, 2}) Declare(rank);
    answers_.Await(answered_ += 3);
    Push(0, 0, 0, kLong, 0, kHuge);
    Push(2, 0, 0, kLong, 0, -kHuge);
    Push(1, 0, 0, kLong, 0, 1);
    const auto all = answers_.Await(answered_ += 3);
    ASSERT_EQ(all.size(), answered_);
    EXPECT_EQ(all.back().error, "");
    EXPECT_EQ(all.back().values, std::vector<float>(4, in_order ? 0 : 1));
  }
}

// The receiving thread hands a large sum to an engine thread, and goes on receiving.
TEST_F(ServerTest, LargeSumsAreSentByAnEngineThread) {
  declaration_.name = "large";
  declaration_.bytes = declaration_.partition_bytes = 256 << 10;
  for (int rank : {0, 1}) Declare(rank);
  for (uint32_t round = 0; round < 50; ++round) {
    Push(0, 0, round, kLong);
    Push(1, 0, round, kLong);
    const auto all = answers_.Await(6 + 2 * round);
    ASSERT_EQ(all.size(), 6 + 2 * round);
    EXPECT_NE(all.back().sent_by, std::this_thread::get_id());
  }
}

// A server that stood still first handles the messages that arrived in the meantime, and waits a
// little for more, before it fails late rounds.
TEST_F(ServerTest, WhoStoodStillCallsNobodyLate) {
  declaration_.name = "large";  // served by the engine thread
  declaration_.bytes = 3 * (256 << 10);
  declaration_.partition_bytes = 256 << 10;
  for (int rank : {0, 1}) Declare(rank);
  answers_.Await(4);
  constexpr uint32_t kShort = 500;
  std::set<uint64_t> sums = {Push(0, 0, 0, kShort), Push(0, 1, 0, kShort)};
  // The test simulates the stall: the watch is not fed, and the engine thread waits in an answer.
  auto* const watch = ps::StallWatch::Get();
  watch->Begin(std::chrono::milliseconds(kShort), std::chrono::steady_clock::now());
  answers_.Hold();
  Push(0, 2, 0, kLong);
  Push(1, 2, 0, kLong);
  ASSERT_TRUE(answers_.AwaitHeld());
  sums.insert(Push(1, 0, 0, kShort));  // pushed in time, but not handled
  std::this_thread::sleep_for(std::chrono::milliseconds(4 * kShort + 500));
  sums.insert(Push(1, 1, 0, kShort));  // read from a socket after the pause
  answers_.Release();
  const auto all = answers_.Await(10);
  watch->End(std::chrono::steady_clock::now());
  ASSERT_EQ(all.size(), 10u);
  for (const auto& answer : all) {
    if (sums.count(answer.number) == 1) {
      EXPECT_EQ(answer.error, "");
    }
  }
  EXPECT_TRUE(ComesToHave(0));
}

// Each round fails at its own deadline, in whatever order they arrived. Other rounds continue.
TEST_F(ServerTest, LateRoundsFailAlone) {
  const uint64_t waits = Push(0, 0, 0, kLong);
  std::map<uint64_t, int> late;  // partition by request
  for (const int partition : {1, 2, 3}) late[Push(0, partition, 0, 400 / partition)] = partition;
  const auto failed = answers_.Await(5);
  ASSERT_EQ(failed.size(), 5u);
  for (size_t i = 2; i < 5; ++i) {
    ASSERT_EQ(late.count(failed[i].number), 1u);
    const std::string partition = std::to_string(late[failed[i].number]);
    const std::string& error = failed[i].error;
    EXPECT_NE(error.find("timed out: partition " + partition + ","), std::string::npos) << error;
    EXPECT_NE(error.find("still lacks the push of worker 1"), std::string::npos) << error;
    late.erase(failed[i].number);
  }
  EXPECT_TRUE(ComesToHave(1));

  const uint64_t completes = Push(1, 0, 0, kLong);
  const auto all = answers_.Await(7);
  ASSERT_EQ(all.size(), 7u);
  for (size_t i = 5; i < 7; ++i) {
    EXPECT_TRUE(all[i].number == waits || all[i].number == completes);
    EXPECT_EQ(all[i].error, "");
    EXPECT_EQ(all[i].values, std::vector<float>(4, 3));
  }
  EXPECT_TRUE(ComesToHave(0));
}

// The deadline of a complete sum passes without effect.
TEST_F(ServerTest, RoundsThatAreDoneHaveNoDeadline) {
  size_t answers = 2;
  uint32_t timeout_ms = 100;
  bool done = false;
  for (uint32_t round = 0; !done; ++round) {
    ASSERT_LT(timeout_ms, kLong);
    Push(0, 0, round, timeout_ms);
    Push(1, 0, round, timeout_ms);
    const auto all = answers_.Await(answers += 2);
    ASSERT_EQ(all.size(), answers);
    done = (all[answers - 2].error + all[answers - 1].error).empty();
    if (!done) timeout_ms *= 2;  // the machine was too slow
  }
  // When this push fails, a later deadline has passed, too.
  const uint64_t late = Push(0, 1, 0, timeout_ms);
  const auto failed = answers_.Await(++answers);
  ASSERT_EQ(failed.size(), answers);
  EXPECT_EQ(failed.back().number, late);
  EXPECT_NE(failed.back().error, "");
  // Pushes that come later get the same error.
  const uint64_t too_late = Push(1, 1, 0, timeout_ms);
  const auto told = answers_.Await(++answers);
  ASSERT_EQ(told.size(), answers);
  EXPECT_EQ(told.back().number, too_late);
  EXPECT_EQ(told.back().error, failed.back().error);
  EXPECT_TRUE(ComesToHave(0));
}

// A push of a round that its member has given up is refused. Pushes ahead of open rounds are not.
TEST_F(ServerTest, RoundsAreGivenUpByTheirMember) {
  const uint64_t waits = Push(0, 0, 0, kLong);
  const uint64_t ahead = Push(0, 0, 1, kLong);
  Push(1, 0, 1, kLong);  // overtakes round 0, which it has not given up
  auto all = answers_.Await(4);
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all[2].number == ahead ? all[2].error : all[3].error, "");
  EXPECT_TRUE(ComesToHave(1));
  Push(1, 0, 2, kLong, 2);
  all = answers_.Await(5);
  ASSERT_EQ(all.size(), 5u);
  EXPECT_EQ(all[4].number, waits);
  EXPECT_EQ(all[4].error,
            "worker 1 gave up round 0 of 'tensor', in which something of it failed, and went on");
  const uint64_t late = Push(1, 0, 0, kLong);
  all = answers_.Await(6);
  ASSERT_EQ(all.size(), 6u);
  EXPECT_EQ(all[5].number, late);
  EXPECT_EQ(all[5].error, "worker 1 pushed round 0 of 'tensor', which is over");
  Push(0, 0, 2, kLong, 2);
  all = answers_.Await(8);
  ASSERT_EQ(all.size(), 8u);
  EXPECT_EQ(all[6].error + all[7].error, "");
  EXPECT_TRUE(ComesToHave(0));
}

// A server limits the open rounds of a tensor, by its size.
TEST_F(ServerTest, RoundsAreOpenWithinLimits) {
  EXPECT_EQ(MostRounds("of few bytes", 4 << 10), 2 * 1024);
  EXPECT_EQ(MostRounds("of some bytes", 32 << 20), 2 * 32);
  EXPECT_EQ(MostRounds("of many bytes", 1 << 30), 2 * 16);
}

// Undeclared values get no memory.
TEST_F(ServerTest, ValuesThatNobodyDeclaredAreNotExpected) {
  const auto expects = [this](int op, uint64_t key, size_t bytes) {
    return server_.Expects(MakeRequest(op, 0, key, 1, ""), bytes);
  };
  const uint64_t key = declaration_.Key();
  EXPECT_TRUE(expects(kPushPull, key + 7, kPartitionBytes));
  EXPECT_FALSE(expects(kPushPull, key + 7, kPartitionBytes + 4));
  EXPECT_FALSE(expects(kPushPull, key + 8, kPartitionBytes));
  EXPECT_FALSE(expects(kPushPull, key + kMaxPartitions, kPartitionBytes));
  EXPECT_FALSE(expects(kPushStep, key, kPartitionBytes));
  EXPECT_FALSE(expects(kDeclare, key, kPartitionBytes));
  EXPECT_FALSE(expects(77, key, kPartitionBytes));
  EXPECT_FALSE(server_.Expects(MakeAnswer(kPushPull, 0, key, 1, ""), kPartitionBytes));
}

// A lost worker fails its rounds at once, not at their deadlines.
TEST_F(ServerTest, LostWorkerEndsRoundsBeforeTheirDeadline) {
  Push(0, 0, 0, kLong);
  Push(0, 1, 0, kLong);
  server_.OnWorkerGone(1, "worker 1 was lost");
  const auto failed = answers_.Await(4);
  ASSERT_EQ(failed.size(), 4u);
  for (size_t i = 2; i < 4; ++i) {
    EXPECT_NE(failed[i].error.find("worker 1 was lost"), std::string::npos) << failed[i].error;
  }
  EXPECT_TRUE(ComesToHave(0));
}

}  // namespace
}  // namespace core
}  // namespace byteps
