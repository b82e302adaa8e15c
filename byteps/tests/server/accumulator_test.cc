// How the pushes of one round are added, and rounds without the members of replicas that were
// removed (server/rounds_failures.cc).
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "byteps/base/block_codec.h"
#include "byteps/base/invariant.h"
#include "byteps/base/mutex.h"
#include "byteps/base/protocol.h"
#include "byteps/server/round.h"
#include "byteps/server/sum_server.h"
#include "tests/server/optimizer/step_job.h"
#include "tests/support/kit.h"

namespace byteps {
namespace core {
namespace {

constexpr size_t kCount = 5;
using Values = std::vector<float>;

SharedBytes Filled(float value) {
  const std::vector<float> values(kCount, value);
  const SharedBytes bytes = SharedBytes::New(sizeof(float) * kCount);
  memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::vector<float> ValuesOf(const SharedBytes& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

Declaration Of(uint32_t members, bool average = false) {
  Declaration declaration;
  declaration.name = "x";
  declaration.bytes = declaration.partition_bytes = kCount * sizeof(float);
  declaration.average = average;
  for (uint32_t rank = 0; rank < members; ++rank) declaration.group.push_back(rank);
  return declaration;
}

TEST(Accumulator, AddsEachPushOnceHoweverMany) {
  for (uint32_t members = 1; members <= 5; ++members) {
    for (const bool average : {false, true}) {
      const Declaration declaration = Of(members, average);
      Scratch scratch;
      Accumulator accumulator;
      float sum = 0;
      for (uint32_t member = 0; member < members; ++member) {
        EXPECT_EQ(accumulator.added(), member);
        accumulator.Take(declaration, {}, member, Filled(static_cast<float>(1 << member)),
                         &scratch);
        sum += static_cast<float>(1 << member);
      }
      const float wanted = average ? sum / static_cast<float>(members) : sum;
      EXPECT_EQ(ValuesOf(accumulator.sum()), std::vector<float>(kCount, wanted)) << members;
    }
  }
}

// Of some members' pushes, in whatever order the others' come.
TEST(Accumulator, ClosesWithoutThoseWhoDoNotCome) {
  for (uint32_t members = 2; members <= 5; ++members) {
    for (uint32_t who = 1; who + 1 < (1u << members); ++who) {
      for (const bool average : {false, true}) {
        for (const bool in_order : {false, true}) {
          for (const bool wide : {false, true}) {
            const Declaration declaration = Of(members, average);
            AdditionRule rule;
            rule.in_order = in_order;
            rule.wide_float32 = wide;
            Scratch scratch;
            Accumulator accumulator;
            int count = 0;
            float sum = 0;
            for (uint32_t member = members; member-- > 0;) {
              if ((who >> member & 1) == 0) continue;
              accumulator.Take(declaration, rule, member, Filled(static_cast<float>(3 + member)),
                               &scratch);
              sum += static_cast<float>(3 + member);
              ++count;
            }
            accumulator.Close(declaration, rule, &scratch);
            const int times = average ? 1 : static_cast<int>(members);
            const auto wanted = static_cast<float>(double{sum} * times / count);
            EXPECT_EQ(ValuesOf(accumulator.sum()), std::vector<float>(kCount, wanted))
                << who << " of " << members;
          }
        }
      }
    }
  }
}

// A sum that lacks members is of blocks like any other.
TEST(Accumulator, ClosesSumsOfBlocks) {
  constexpr size_t kBlocks = 2;
  for (uint32_t members : {2u, 3u, 10u}) {
    for (uint32_t count = 1; count < members; ++count) {
      Declaration declaration = Of(members);
      declaration.dtype = DType::kInt8x128;
      declaration.bytes = declaration.partition_bytes = kBlocks * SizeOf(declaration.dtype);
      const std::vector<float> ones(kBlocks * kBlockValues, 1);
      Scratch scratch;
      Accumulator accumulator;
      for (uint32_t member = 0; member < count; ++member) {
        const SharedBytes blocks = SharedBytes::New(declaration.bytes);
        EncodeBlocks(declaration.dtype, blocks.data(), DType::kFloat32, ones.data(), ones.size(),
                     nullptr);
        accumulator.Take(declaration, {}, member, blocks, &scratch);
      }
      accumulator.Close(declaration, {}, &scratch);
      std::vector<float> sum(ones.size());
      DecodeBlocks(declaration.dtype, accumulator.sum().data(), DType::kFloat32, sum.data(),
                   sum.size());
      for (const float value : sum) {
        ASSERT_NEAR(value, static_cast<float>(members), 0.02 * members) << count;
      }
    }
  }
}

// Where servers update by them, their sum is fp32: it is scaled in that, and not rounded to blocks.
TEST(Accumulator, ClosesGradientsThatComeInBlocks) {
  for (uint32_t members : {2u, 3u, 10u, 19u}) {
    for (uint32_t count = 1; count < members; ++count) {
      Declaration declaration = Of(members);
      declaration.dtype = DType::kInt8x128;
      declaration.bytes = declaration.partition_bytes = SizeOf(declaration.dtype);
      declaration.rule = std::make_shared<UpdateRule>();
      std::vector<float> values(kBlockValues);
      for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) - 60.5f;
      Scratch scratch;
      Accumulator accumulator;
      Values one(kBlockValues);
      for (uint32_t member = 0; member < count; ++member) {
        const SharedBytes blocks = SharedBytes::New(declaration.bytes);
        EncodeBlocks(declaration.dtype, blocks.data(), DType::kFloat32, values.data(),
                     values.size(), nullptr);
        DecodeBlocks(declaration.dtype, blocks.data(), DType::kFloat32, one.data(), one.size());
        accumulator.Take(declaration, {}, member, blocks, &scratch);
      }
      accumulator.Close(declaration, {}, &scratch);
      const Values sum = ValuesOf(accumulator.sum());
      ASSERT_EQ(sum.size(), one.size());
      for (size_t i = 0; i < sum.size(); ++i) {
        ASSERT_FLOAT_EQ(sum[i], one[i] * static_cast<float>(members)) << count << " at " << i;
      }
    }
  }
}

// 1, 2^24 and -2^24 in fp32: their sum depends on the order in which they are added.
TEST(Accumulator, InOrderItWaitsForThoseBefore) {
  const Declaration declaration = Of(3);
  const float values[] = {1, 1 << 24, -(1 << 24)};
  for (const auto& order : std::vector<std::vector<size_t>>{{0, 1, 2}, {2, 1, 0}, {1, 2, 0}}) {
    AdditionRule rule;
    rule.in_order = true;
    rule.wide_float32 = false;
    Scratch scratch;
    Accumulator accumulator;
    for (const size_t member : order) {
      accumulator.Take(declaration, rule, member, Filled(values[member]), &scratch);
    }
    EXPECT_EQ(accumulator.added(), 3u);
    EXPECT_EQ(ValuesOf(accumulator.sum()), std::vector<float>(kCount, 0)) << "1 + 2^24 is 2^24";
  }
}

TEST(Accumulator, InAWiderTypeItRoundsOnce) {
  const Declaration declaration = Of(3);
  Scratch scratch;
  Accumulator accumulator;
  const float values[] = {1, 1 << 24, -(1 << 24)};
  for (size_t member = 0; member < 3; ++member) {
    accumulator.Take(declaration, {}, member, Filled(values[member]), &scratch);
  }
  EXPECT_EQ(ValuesOf(accumulator.sum()), std::vector<float>(kCount, 1));
}

TEST(Accumulator, KeepsTheMemoryOfAPushOnlyWhereItIsWanted) {
  for (const uint32_t members : {2, 3}) {
    for (const bool keeps : {false, true}) {
      AdditionRule rule;
      rule.keeps_memory = keeps;
      Scratch scratch;
      Accumulator accumulator;
      for (uint32_t member = 0; member < members; ++member) {
        accumulator.Take(Of(members), rule, member, Filled(1), &scratch);
      }
      const SharedBytes spare = accumulator.TakeSpare();
      EXPECT_EQ(spare.size(), keeps ? kCount * sizeof(float) : 0) << members;
      EXPECT_NE(spare.data(), accumulator.sum().data());
      EXPECT_TRUE(accumulator.TakeSpare().empty());
    }
  }
}

// In one pass up to so many, and in several beyond.
TEST(Accumulator, AddsBlocksOfFewBitsHoweverMany) {
  constexpr uint64_t kValues = 3 * kBlockValues;
  for (const DType type : {DType::kInt8x128, DType::kInt4x128}) {
    for (const uint32_t members : {1, 2, 7, 8, 9, 16, 17, 25}) {
      Declaration declaration = Of(members, true);
      declaration.dtype = type;
      declaration.bytes = declaration.partition_bytes = BlocksOf(kValues) * SizeOf(type);
      Scratch scratch;
      Accumulator accumulator;
      // Whole numbers of which each block has the largest: nothing is lost on the way up.
      const std::vector<float> values(kValues, type == DType::kInt8x128 ? 127.f : 7.f);
      for (uint32_t member = 0; member < members; ++member) {
        const SharedBytes pushed = SharedBytes::New(declaration.bytes);
        EncodeBlocks(type, pushed.data(), DType::kFloat32, values.data(), kValues, nullptr);
        accumulator.Take(declaration, {}, member, pushed, &scratch);
        EXPECT_EQ(accumulator.added(), member + 1);
      }
      std::vector<float> average(kValues);
      ASSERT_EQ(accumulator.sum().size(), declaration.bytes);
      DecodeBlocks(type, accumulator.sum().data(), DType::kFloat32, average.data(), kValues);
      EXPECT_EQ(average, values) << members;
      accumulator.Clear(&scratch);
      EXPECT_TRUE(accumulator.sum().empty());
    }
  }
}

TEST(Accumulator, OnceClearedItHoldsNothing) {
  int released = 0;
  const Declaration declaration = Of(4);
  Scratch scratch;
  Accumulator accumulator;
  std::vector<char> memory(kCount * sizeof(float));
  for (size_t member = 0; member < 3; ++member) {
    accumulator.Take(declaration, {}, member,
                     SharedBytes::Borrow(memory.data(), memory.size(), [&](char*) { ++released; }),
                     &scratch);
  }
  accumulator.Clear(&scratch);
  EXPECT_EQ(released, 3);
  EXPECT_TRUE(accumulator.sum().empty());
}

// What is answered without the members of removed replicas, and what is said to the scheduler.
class HeardAnswers : public Answers {
 public:
  void SayAwaited(int rank, const std::string& name, uint32_t round) override {
    Heard("worker " + std::to_string(rank) + " in round " + std::to_string(round) + " of " + name);
  }
  void SayLate(int rank, const std::string& why) override {
    Heard("late: worker " + std::to_string(rank) + ", as " + why);
  }
  // All words; waits until there are `count`.
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
  Server server_;
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

TEST_P(AbsentTest, WhatItHasPushedCounts) {
  const uint64_t its = Push(1, 0), first = Push(0, 0);
  server_.SetAbsent({1});
  const uint64_t last = Push(2, 0);
  Expect(first, 7, {});
  Expect(last, 7, {});
  EXPECT_FALSE(answers_.Has(its)) << "nobody is there to be answered";
}

TEST_P(AbsentTest, LaterRoundsLackItAndItsPushesAreRefused) {
  server_.SetAbsent({0, 2});
  Expect(Push(1, 0), 2 * 3, {0, 2});
  const Answers::Answer refused = answers_.Await(Push(0, 0));
  EXPECT_TRUE(refused.failed);
  EXPECT_NE(refused.body.find("its replica was removed"), std::string::npos) << refused.body;
  Expect(Push(1, 1, 1), 2 * 3, {0, 2});
}

TEST_P(AbsentTest, OneThatComesBackIsInEachRoundThatBeginsThen) {
  server_.SetAbsent({1});
  const uint64_t first = Push(0, 0);
  Expect(Push(2, 0), 5 * 3 / 2.0f, {1});
  answers_.Await(first);
  server_.SetAbsent({});
  const uint64_t second = Push(0, 1, 1);
  Push(2, 1, 1);
  EXPECT_FALSE(answers_.Has(second));
  Expect(Push(1, 1, 1), 7, {});
  Expect(second, 7, {});
}

TEST_P(AbsentTest, ARoundThatNobodyElseIsInLeavesNothing) {
  Push(1, 0);
  Push(0, 0);
  server_.SetAbsent({0, 1});
  Expect(Push(2, 0), 7, {});
  server_.SetAbsent({0, 1, 2});
  server_.SetAbsent({0, 1});
  Expect(Push(2, 1, 1), 4 * 3, {0, 1});
}

// ------------------------------------------------------------------ those that are late

TEST_P(AbsentTest, OneThatIsLateAfterAQuorumIsToBeRemoved) {
  declaration_.patience = {1, 2, 200};
  PushAll(0);
  const uint64_t first = Push(0, 1, 1), second = Push(2, 1, 1);
  const std::vector<std::string> told = answers_.Told(2);
  ASSERT_EQ(told.size(), 2u);
  EXPECT_EQ(told[0], "worker 1 in round 1 of tensor");
  EXPECT_EQ(told[1].find("late: worker 1, as it had not pushed 'tensor'"), 0u) << told[1];
  EXPECT_NE(told[1].find("s after 2 replicas (BYTEPS_QUORUM=2, BYTEPS_GRACE_S=0.2)"),
            std::string::npos)
      << told[1];
  server_.SetAbsent({1});
  Expect(first, 5 * 3 / 2.0f, {1});
  Expect(second, 5 * 3 / 2.0f, {1});
  // Those that are there go on as before.
  Push(0, 2, 2);
  Expect(Push(2, 2, 2), 5 * 3 / 2.0f, {1});
}

// It compiles, and allocates: nobody tells the scheduler of it before the sum's own limit.
TEST_P(AbsentTest, TheFirstPushOfAReplicaMayBeLate) {
  declaration_.patience = {1, 2, 1};
  Push(0, 0);
  Push(2, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  Expect(Push(1, 0), 7, {});
  server_.SetAbsent({1});
  server_.SetAbsent({});  // it has come again
  Push(0, 1, 1);
  Push(2, 1, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(answers_.Told(0).size(), 0u);
  Expect(Push(1, 1, 1), 7, {});
}

TEST_P(AbsentTest, OneThatPushesInItsGraceIsNot) {
  declaration_.patience = {1, 2, 40'000};  // it is told after two seconds
  PushAll(0);
  const uint64_t first = Push(0, 1, 1);
  Push(2, 1, 1);
  EXPECT_EQ(answers_.Told(1), std::vector<std::string>{"worker 1 in round 1 of tensor"});
  Push(1, 1, 1);
  Expect(first, 7, {});
}

// The same where the gradients are of an optimizer on the servers.
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
    memcpy(&sums, answer.values.data(), sizeof(sums));
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
