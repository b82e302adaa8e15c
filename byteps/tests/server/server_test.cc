// The server's rounds: which of them fail, and when.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/base/process.h"
#include "byteps/base/protocol.h"
#include "byteps/cluster/channel.h"
#include "byteps/server/sum_server.h"
#include "tests/support/kit.h"

namespace byteps {
namespace core {
namespace {

constexpr auto kPatience = std::chrono::seconds(120);
constexpr uint32_t kPartitionBytes = 16;
constexpr uint32_t kLong = 600'000;  // ms

// Keeps the answers, in the order in which they come.
class Answers : public ServerChannel {
 public:
  struct Answer {
    uint64_t number;
    std::string error;
    std::vector<float> values;
    std::thread::id sent_by;
  };

  void Send(const Message& message) override {
    Answer answer{message.number, message.body, {}, std::this_thread::get_id()};
    answer.values.resize(message.values.size() / sizeof(float));
    memcpy(answer.values.data(), message.values.data(), message.values.size());
    ps::MutexLock lock(&mu_);
    answers_.push_back(std::move(answer));
    held_ = holds_;
    cond_.NotifyAll();
    cond_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return !holds_; });
  }

  // Who sends the next answer does not return before Release.
  void Hold() {
    ps::MutexLock lock(&mu_);
    holds_ = true;
  }
  bool AwaitHeld() {
    ps::MutexLock lock(&mu_);
    return cond_.WaitFor(&mu_, kPatience, [this]() PS_REQUIRES(mu_) { return held_; });
  }
  void Release() {
    ps::MutexLock lock(&mu_);
    holds_ = held_ = false;
    cond_.NotifyAll();
  }

  size_t Count() {
    ps::MutexLock lock(&mu_);
    return answers_.size();
  }

  // All so far, once there are so many.
  std::vector<Answer> Await(size_t count) {
    ps::MutexLock lock(&mu_);
    const bool came =
        cond_.WaitFor(&mu_, kPatience, [&]() PS_REQUIRES(mu_) { return answers_.size() >= count; });
    EXPECT_TRUE(came) << answers_.size() << " of " << count << " answers";
    return answers_;
  }

 private:
  ps::Mutex mu_;
  ps::CondVar cond_;
  std::vector<Answer> answers_ PS_GUARDED_BY(mu_);
  bool holds_ PS_GUARDED_BY(mu_) = false;
  bool held_ PS_GUARDED_BY(mu_) = false;
};

class ServerTest : public testing::Test {
 protected:
  ServerTest() : server_(ConfigWith({{"BYTEPS_SERVER_ENGINE_THREAD", "1"}}), &answers_) {
    declaration_.name = "tensor";
    declaration_.dtype = DType::kFloat32;
    declaration_.bytes = 8 * kPartitionBytes;
    declaration_.partition_bytes = kPartitionBytes;
    declaration_.group = {0, 1};
    for (int rank : {0, 1}) Declare(rank);
    answers_.Await(2);
  }

  void Declare(int rank) {
    Tell(MakeRequest(kDeclare, 0, declaration_.Key(), ++number_, PackDeclarations({declaration_})),
         rank);
  }

  // Returns the number of the request.
  uint64_t Push(int rank, uint64_t index, uint32_t round, uint32_t timeout_ms, uint32_t oldest = 0,
                std::optional<float> pushed = {}) {
    PushHeader header;
    header.round = round;
    header.oldest = oldest;
    header.timeout_ms = timeout_ms;
    header.pull_bytes = declaration_.partition_bytes;
    Message push = MakeRequest(kPushPull, 0, declaration_.Key() + index, ++number_, header.Pack());
    const SharedBytes values = SharedBytes::New(declaration_.partition_bytes);
    const float value = pushed.value_or(static_cast<float>(1 + rank + 10 * index));
    for (size_t at = 0; at < values.size(); at += sizeof(value)) {
      memcpy(values.data() + at, &value, sizeof(value));
    }
    push.SetValues(values);
    Tell(std::move(push), rank);
    return number_;
  }

  // How many rounds of a tensor of `bytes` bytes worker 0 may push when nobody else pushes any.
  uint32_t MostRounds(const std::string& name, uint64_t bytes) {
    declaration_.name = name;
    declaration_.bytes = bytes;
    declaration_.partition_bytes =
        std::max(kPartitionBytes, static_cast<uint32_t>(bytes / (kMaxPartitions / 2)));
    for (int rank : {0, 1}) Declare(rank);
    const uint64_t open = server_.OpenRounds();
    answers_.Await(answered_ += 2);
    for (uint32_t round = 0;; ++round) {
      const uint64_t number = Push(0, 0, round, kLong);
      // Those that are taken have no answer yet.
      if (ComesToHave(open + round + 1, [&] { return answers_.Count() > answered_; })) continue;
      const auto refused = answers_.Await(++answered_).back();
      EXPECT_EQ(refused.number, number);
      EXPECT_NE(refused.error.find("a server keeps " + std::to_string(round) + " rounds"),
                std::string::npos)
          << refused.error;
      return round;
    }
  }

  // So many open rounds: a round is closed after its answers are sent.
  bool ComesToHave(uint64_t rounds, const std::function<bool()>& never = [] { return false; }) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (server_.OpenRounds() != rounds) {
      if (never()) return false;
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  void Tell(Message request, int rank) {
    request.peer = rank;
    server_.OnMessage(&request);
  }

  Answers answers_;
  Server server_;
  Declaration declaration_;
  uint64_t number_ = 0;
  size_t answered_ = 2;
};

// Of a small partition, the thread with the last push finds its engine idle and sends the sum.
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
    // Its engine has just been told of an earlier deadline.
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
  }
}

// The tensor says so, not the server.  What 2^80 + 1 rounds away depends on the order.
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

// Who receives goes on receiving.
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

// A server that stood still looks at what has come meanwhile before it calls anything late, and
// waits a little for what comes then.
TEST_F(ServerTest, WhoStoodStillCallsNobodyLate) {
  declaration_.name = "large";  // served by the engine's thread
  declaration_.bytes = 3 * (256 << 10);
  declaration_.partition_bytes = 256 << 10;
  for (int rank : {0, 1}) Declare(rank);
  answers_.Await(4);
  constexpr uint32_t kShort = 500;
  std::set<uint64_t> sums = {Push(0, 0, 0, kShort), Push(0, 1, 0, kShort)};
  // Nobody tells the watch meanwhile that the process runs, and the engine's thread waits where it
  // answers.
  auto* const watch = ps::StallWatch::Get();
  watch->Begin(std::chrono::milliseconds(kShort), std::chrono::steady_clock::now());
  answers_.Hold();
  Push(0, 2, 0, kLong);
  Push(1, 2, 0, kLong);
  ASSERT_TRUE(answers_.AwaitHeld());
  sums.insert(Push(1, 0, 0, kShort));  // in time, but not looked at
  std::this_thread::sleep_for(std::chrono::milliseconds(4 * kShort + 500));
  sums.insert(Push(1, 1, 0, kShort));  // as it comes from a socket after a pause
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

// Each by its own deadline, whatever came first, and nobody else's round with it.
TEST_F(ServerTest, LateRoundsFailAlone) {
  const uint64_t waits = Push(0, 0, 0, kLong);
  std::map<uint64_t, int> late;  // the partitions, by request
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

// The deadline of a sum that was made passes, and nothing happens.
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
    if (!done) timeout_ms *= 2;  // a busy machine was too slow for it
  }
  // A later deadline has passed when this fails.
  const uint64_t late = Push(0, 1, 0, timeout_ms);
  const auto failed = answers_.Await(++answers);
  ASSERT_EQ(failed.size(), answers);
  EXPECT_EQ(failed.back().number, late);
  EXPECT_NE(failed.back().error, "");
  // Who comes too late is told the same.
  const uint64_t too_late = Push(1, 1, 0, timeout_ms);
  const auto told = answers_.Await(++answers);
  ASSERT_EQ(told.size(), answers);
  EXPECT_EQ(told.back().number, too_late);
  EXPECT_EQ(told.back().error, failed.back().error);
  EXPECT_TRUE(ComesToHave(0));
}

// What comes of a round that its member gave up is too late; what is pushed before older rounds
// have ended is not.
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

// A worker cannot make a server keep more than some rounds of a tensor; how many depends on its
// size.
TEST_F(ServerTest, RoundsAreOpenWithinLimits) {
  EXPECT_EQ(MostRounds("of few bytes", 4 << 10), 2 * 1024);
  EXPECT_EQ(MostRounds("of some bytes", 32 << 20), 2 * 32);
  EXPECT_EQ(MostRounds("of many bytes", 1 << 30), 2 * 16);
}

// A server without memory says what it wanted it for, and goes on.
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
    EXPECT_EQ(all[i].error,
              "server 0 is out of memory: it wanted 262144 bytes for a push of 'wide' from worker "
              "1, partition 0; take more servers, or servers with more memory (python -m "
              "byteps.sizing says how much)");
  }
  for (int rank : {0, 1, 2}) Push(rank, 0, 1, kLong);
  all = answers_.Await(11);
  for (size_t i = 8; i < 11; ++i) EXPECT_EQ(all[i].values, std::vector<float>(kBytes / 4, 6));
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

// Before any memory is taken for them.
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

// A lost worker ends its rounds at once: nothing is left of their deadlines.
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
