// Tests of rounds without members whose replicas were removed, or are late.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "tests/server/optimizer/step_job.h"
#include "tests/support/kit.h"
#include "tests/support/recovering_server.h"

namespace byteps {
namespace core {
namespace {

// Answers without removed members, and messages to the scheduler.
class HeardAnswers : public Answers {
 public:
  void SayAwaited(int rank, const std::string& name, uint32_t round) override {
    Heard("worker " + std::to_string(rank) + " in round " + std::to_string(round) + " of " + name);
  }
  void SayLate(int rank, const std::string& why) override {
    Heard("late: worker " + std::to_string(rank) + ", as " + why);
  }
  // Waits for `count` messages, and returns all messages.
  std::vector<std::string> Told(size_t count) {
    ps::MutexLock lock(&mu_);
    cond_.WaitFor(&mu_, kPatience, [&]() PS_REQUIRES(mu_) { return told_.size() >= count; });
    return told_;
  }

 private:
  void Heard(const std::string& text) {
    ps::MutexLock lock(&mu_);
    told_.push_back(text);
    cond_.NotifyAll();
  }

  ps::Mutex mu_;
  ps::CondVar cond_;
  std::vector<std::string> told_ PS_GUARDED_BY(mu_);
};

class AbsentTest : public testing::TestWithParam<const char*> {
 protected:
  AbsentTest()
      : server_(ConfigWith(
                    {{"BYTEPS_SERVER_ENGINE_THREAD", "1"}, {"BYTEPS_DETERMINISTIC", GetParam()}}),
                &answers_) {
    declaration_.name = "tensor";
    declaration_.bytes = declaration_.partition_bytes = 16;
    declaration_.group = {0, 1, 2};
    declaration_.patience.replica_ranks = 1;
  }

  void Declare() {
    for (int rank = 0; rank < 3; ++rank) {
      Message declare =
          MakeRequest(kDeclare, 0, declaration_.Key(), ++number_, PackDeclarations({declaration_}));
      Tell(std::move(declare), rank);
      answers_.Await(number_);
    }
  }

  // Each rank's values are a power of two.
  uint64_t Push(int rank, uint32_t round, uint32_t oldest = 0) {
    if (number_ == 0) Declare();
    PushHeader header;
    header.round = round;
    header.oldest = oldest;
    header.timeout_ms = timeout_ms_;
    header.pull_bytes = declaration_.rule ? 0 : 16;
    std::string body = header.Pack();
    if (declaration_.rule) body += static_cast<char>(Verdict::kNone);
    const int op = declaration_.rule ? kPushNorm : kPushPull;
    Message push = MakeRequest(op, 0, declaration_.Key(), ++number_, body);
    const std::vector<float> values(4, static_cast<float>(1 << rank));
    const SharedBytes bytes = SharedBytes::New(16);
    memcpy(bytes.data(), values.data(), 16);
    push.SetValues(bytes);
    Tell(std::move(push), rank);
    return number_;
  }

  void PushAll(uint32_t round) {
    const uint64_t numbers[] = {Push(0, round, round), Push(1, round, round),
                                Push(2, round, round)};
    for (const uint64_t number : numbers) Expect(number, 7, {});
  }

  void Tell(Message request, int rank) {
    request.peer = rank;
    server_.OnMessage(&request);
  }

  void Expect(uint64_t number, float value, const std::vector<size_t>& missing) {
    const Answers::Answer answer = answers_.Await(number);
    ASSERT_FALSE(answer.failed) << answer.body;
    ASSERT_FALSE(answer.values.empty());
    EXPECT_EQ(answer.values[0], value);
    EXPECT_EQ(UnpackMembers(answer.body, 3), missing);
  }

  HeardAnswers answers_;
  RecoveringServer server_;
  Declaration declaration_;
  uint32_t timeout_ms_ = 600'000;
  uint64_t number_ = 0;
};

TEST_P(AbsentTest, AnOpenRoundClosesWithoutTheOneThatIsRemoved) {
  const uint64_t first = Push(0, 0), second = Push(2, 0);
  server_.SetAbsent({1});
  Expect(first, 5 * 3 / 2.0f, {1});
  Expect(second, 5 * 3 / 2.0f, {1});
}

TEST_P(AbsentTest, LaterRoundsLackItAndItsPushesAreRefused) {
  server_.SetAbsent({0, 2});
  Expect(Push(1, 0), 2 * 3, {0, 2});
  const Answers::Answer refused = answers_.Await(Push(0, 0));
  EXPECT_TRUE(refused.failed);
  EXPECT_NE(refused.body.find("its replica was removed"), std::string::npos) << refused.body;
  Expect(Push(1, 1, 1), 2 * 3, {0, 2});
}

// ------------------------------------------------------------------ late members

TEST_P(AbsentTest, OneThatIsLateAfterAQuorumIsToBeRemoved) {
  declaration_.patience = {1, 2, 200};
  PushAll(0);
  const uint64_t first = Push(0, 1, 1), second = Push(2, 1, 1);
  const std::vector<std::string> told = answers_.Told(2);
  ASSERT_EQ(told.size(), 2u);
  EXPECT_EQ(told[0], "worker 1 in round 1 of tensor");
  EXPECT_EQ(told[1].find("late: worker 1, as it had not pushed 'tensor'"), 0u) << told[1];
  EXPECT_NE(told[1].find("s after 2 replicas (quorum 2@0.2)"), std::string::npos) << told[1];
  server_.SetAbsent({1});
  Expect(first, 5 * 3 / 2.0f, {1});
  Expect(second, 5 * 3 / 2.0f, {1});
  // The other members continue as before.
  Push(0, 2, 2);
  Expect(Push(2, 2, 2), 5 * 3 / 2.0f, {1});
}

// In its first step a replica compiles and allocates, so only the sum's own limit counts.
TEST_P(AbsentTest, TheFirstPushOfAReplicaMayBeLate) {
  declaration_.patience = {1, 2, 1};
  Push(0, 0);
  Push(2, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  Expect(Push(1, 0), 7, {});
  server_.SetAbsent({1});
  server_.SetAbsent({});  // replica 1 came back
  Push(0, 1, 1);
  Push(2, 1, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(answers_.Told(0).size(), 0u);
  Expect(Push(1, 1, 1), 7, {});
}

TEST_P(AbsentTest, NobodyIsLateWhileTheyMayWaitForAServerThatIsLost) {
  declaration_.patience = {1, 2, 200};
  PushAll(0);
  server_.OnServerLost(1);
  const uint64_t first = Push(0, 1, 1);
  Push(2, 1, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  EXPECT_EQ(answers_.Told(0).size(), 0u);
  const auto filled = std::chrono::steady_clock::now();
  server_.OnServerReplaced(1);
  const std::vector<std::string> told = answers_.Told(2);
  EXPECT_EQ(told[0], "worker 1 in round 1 of tensor");
  EXPECT_EQ(told[1].find("late: worker 1, as it had not pushed 'tensor'"), 0u) << told[1];
  EXPECT_GE(std::chrono::steady_clock::now() - filled, std::chrono::milliseconds(200));
  server_.SetAbsent({1});
  Expect(first, 5 * 3 / 2.0f, {1});
}

TEST_P(AbsentTest, OneThatPushesInItsGraceIsNot) {
  declaration_.patience = {1, 2, 40'000};  // the message goes out after two seconds
  PushAll(0);
  const uint64_t first = Push(0, 1, 1);
  Push(2, 1, 1);
  EXPECT_EQ(answers_.Told(1), std::vector<std::string>{"worker 1 in round 1 of tensor"});
  Push(1, 1, 1);
  Expect(first, 7, {});
}

// The same test with gradients of an optimizer on the servers.
TEST_P(AbsentTest, OneThatIsLateWithGradientsIsToBeRemoved) {
  auto rule = std::make_shared<UpdateRule>();
  rule->groups = {{0.9, 0.95, 1e-8, false}};
  rule->segments = {{4, 0}};
  declaration_.rule = rule;
  timeout_ms_ = 100;
  const uint64_t first = Push(1, 0), second = Push(2, 0);
  const std::vector<std::string> told = answers_.Told(1);
  EXPECT_EQ(told[0].find("late: worker 0, as it had not pushed 'tensor' for "), 0u) << told[0];
  server_.SetAbsent({0});
  for (const uint64_t number : {first, second}) {
    const Answers::Answer answer = answers_.Await(number);
    ASSERT_FALSE(answer.failed) << answer.body;
    GradientSums sums;
    ASSERT_EQ(answer.values.size() * sizeof(float), sizeof(sums));
    memcpy(static_cast<void*>(&sums), answer.values.data(), sizeof(sums));
    EXPECT_EQ(sums.squares, 4 * 9 * 9);
  }
}

TEST_P(AbsentTest, WithoutAQuorumHalfOfThemAreEnoughOnceTheSumTakesTooLong) {
  timeout_ms_ = 100;
  const uint64_t first = Push(1, 0);
  Push(2, 0);
  const std::vector<std::string> told = answers_.Told(1);
  EXPECT_EQ(told[0].find("late: worker 0, as it had not pushed 'tensor' for "), 0u) << told[0];
  server_.SetAbsent({0});
  Expect(first, 6 * 3 / 2.0f, {0});
}

TEST_P(AbsentTest, OneThatIsAloneIsNotRight) {
  timeout_ms_ = 100;
  const Answers::Answer answer = answers_.Await(Push(1, 0));
  EXPECT_TRUE(answer.failed);
  EXPECT_NE(answer.body.find("still lacks the push of worker 0, worker 2"), std::string::npos);
  EXPECT_EQ(answers_.Told(0).size(), 0u);
}

TEST_P(AbsentTest, OneThatIsLateAndStaysFailsTheSum) {
  timeout_ms_ = 100;
  const uint64_t first = Push(1, 0);
  Push(2, 0);
  answers_.Told(1);
  const Answers::Answer answer = answers_.Await(first);  // the scheduler does nothing
  EXPECT_TRUE(answer.failed);
  EXPECT_NE(answer.body.find("still lacks the push of worker 0"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(Deterministic, AbsentTest, testing::Values("0", "1"));

}  // namespace
}  // namespace core
}  // namespace byteps
