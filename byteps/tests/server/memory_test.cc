// A server without memory fails only the sums that need it.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/protocol.h"
#include "tests/server/server_fixture.h"

namespace byteps {
namespace core {
namespace {

// The error names the purpose of the memory, and the server continues.
TEST_F(ServerTest, LackOfMemoryFailsItsRound) {
  constexpr size_t kBytes = 128 << 10;
  declaration_.name = "wide";
  declaration_.bytes = declaration_.partition_bytes = kBytes;
  declaration_.group = {0, 1, 2};
  for (int rank : {0, 1, 2}) Declare(rank);
  answers_.Await(5);
  {
    const NoMemoryFrom limit(2 * kBytes);
    for (int rank : {0, 1}) Push(rank, 0, 0, kLong);
    answers_.Await(7);
  }
  Push(2, 0, 0, kLong);
  auto all = answers_.Await(8);
  ASSERT_EQ(all.size(), 8u);
  for (size_t i = 5; i < 8; ++i) {
    const std::string& error = all[i].error;
    EXPECT_TRUE(error.starts_with(
        "server 0 is out of memory: it wanted 262144 bytes for a push of 'wide' from worker 1, "
        "partition 0; "))
        << error;
    EXPECT_NE(error.find(" bytes are free ("), std::string::npos) << error;
    EXPECT_TRUE(
        error.ends_with("; take more servers, or servers with more memory (python -m "
                        "byteps.sizing says how much)"))
        << error;
  }
  for (int rank : {0, 1, 2}) Push(rank, 0, 1, kLong);
  all = answers_.Await(11);
  for (size_t i = 8; i < 11; ++i) EXPECT_EQ(all[i].values, std::vector<float>(kBytes / 4, 6));
  EXPECT_TRUE(ComesToHave(0));
}

// Every single allocation may fail: only one sum fails, and each member gets one answer, or none if
// there was no memory to send it.
TEST_F(ServerTest, LackOfAnyMemoryEndsOneSum) {
  uint32_t round = 0;
  bool all_served = false;
  for (int times = 0; !all_served; ++times, ++round) {
    ASSERT_LT(times, 200);
    // Messages allocate memory before the server gets them.
    Message pushes[] = {MakePush(0, 0, round, kLong, round), MakePush(1, 0, round, kLong, round)};
    const std::set<uint64_t> numbers = {pushes[0].number, pushes[1].number};
    {
      const MemoryOnlyTimes little(times);
      for (int rank : {0, 1}) Tell(std::move(pushes[rank]), rank);
    }
    // The next round succeeds, and the server frees the failed round's memory.
    ++round;
    Push(0, 0, round, kLong, round);
    const uint64_t last = Push(1, 0, round, kLong, round);
    const auto answers = AwaitAnswerTo(last);
    std::map<uint64_t, int> times_answered;
    int good = 0;
    for (const auto& answer : answers) {
      EXPECT_EQ(++times_answered[answer.number], 1) << "request " << answer.number;
      if (answer.number == last) {
        EXPECT_EQ(answer.error, "");
        EXPECT_EQ(answer.values, std::vector<float>(4, 3));
      }
      if (numbers.count(answer.number) == 0) continue;
      if (answer.error.empty()) {
        ++good;
      } else {
        EXPECT_TRUE(answer.error.find("is out of memory") != std::string::npos ||
                    answer.error.find("gave up round") != std::string::npos)
            << answer.error;
      }
    }
    all_served = good == 2;
  }
  EXPECT_TRUE(ComesToHave(0));
}

// The transport had no memory, and dropped the values.
TEST_F(ServerTest, DroppedValuesFailTheirRound) {
  const uint64_t waits = Push(0, 3, 0, kLong);
  PushHeader header;
  header.timeout_ms = kLong;
  header.pull_bytes = kPartitionBytes;
  Message push = MakeRequest(kPushPull, 0, declaration_.Key() + 3, ++number_, header.Pack());
  push.sent_bytes = kPartitionBytes;
  Tell(push, 1);
  const auto all = answers_.Await(4);
  ASSERT_EQ(all.size(), 4u);
  for (size_t i = 2; i < 4; ++i) {
    EXPECT_TRUE(all[i].number == waits || all[i].number == number_);
    EXPECT_NE(all[i].error.find("it wanted 16 bytes for a push of 'tensor' from worker 1, "
                                "partition 3"),
              std::string::npos)
        << all[i].error;
  }
  EXPECT_TRUE(ComesToHave(0));
}

}  // namespace
}  // namespace core
}  // namespace byteps
