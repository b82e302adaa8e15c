// What the members of one round may ask the optimizer for.
#include "byteps/server/optimizer/round_update.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "byteps/base/error.h"

namespace byteps {
namespace core {
namespace {

constexpr size_t kCount = 4;
constexpr size_t kBytes = kCount * sizeof(float);

SharedBytes Filled(float value) {
  const std::vector<float> values(kCount, value);
  const SharedBytes bytes = SharedBytes::New(kBytes);
  memcpy(bytes.data(), values.data(), kBytes);
  return bytes;
}

float First(const SharedBytes& bytes) {
  float value = 0;
  memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

std::string StepWith(double learning_rate, bool skip = false, double grad_scale = 1) {
  UpdateStep step;
  step.skip = skip;
  step.grad_scale = grad_scale;
  step.rates = {{learning_rate, 0}};
  return step.Pack();
}

// SGD without momentum, of parameters that begin at 10; gradients are 2.
class RoundUpdateTest : public testing::Test {
 protected:
  RoundUpdateTest() : declaration_(Made()), state_(&declaration_, 0) {
    EXPECT_EQ(state_.Load(0, Filled(10).data()), "");
  }

  static Declaration Made() {
    auto rule = std::make_shared<UpdateRule>();
    rule->algorithm = UpdateRule::kSgd;
    rule->groups = {{}};
    rule->segments = {{kCount, 0}};
    rule->speculative = true;
    Declaration declaration;
    declaration.name = "w";
    declaration.bytes = declaration.partition_bytes = kBytes;
    declaration.group = {0, 1};
    declaration.rule = rule;
    return declaration;
  }

  float Parameter() {
    SharedBytes values = SharedBytes::New(kBytes);
    EXPECT_EQ(state_.Read(0, 0, kBytes, values.data()), "");
    return First(values);
  }

  Declaration declaration_;
  PartitionState state_;
  ServerCounters counters_;
  RoundUpdate update_{&declaration_, 3, &state_, &counters_};
  SharedBytes sum_ = Filled(2);
  std::string failure_;
};

TEST_F(RoundUpdateTest, AStepIsMadeOnceTheGradientsAreSummed) {
  EXPECT_EQ(update_.Agree(0, kPushStep, StepWith(0.5)), "");
  EXPECT_EQ(update_.Agree(1, kPushStep, StepWith(0.5)), "");
  EXPECT_EQ(update_.Complete(&sum_, {}), "");
  EXPECT_EQ(First(sum_), 9);
  EXPECT_EQ(Parameter(), 9);
  EXPECT_TRUE(update_.sums().empty());
}

TEST_F(RoundUpdateTest, AnotherStepThanTheFirstOnesIsRefusedByName) {
  EXPECT_EQ(update_.Agree(0, kPushStep, StepWith(0.5)), "");
  const std::string error = update_.Agree(1, kPushStep, StepWith(0.25));
  EXPECT_NE(error.find("worker 0 asks for step 1"), std::string::npos) << error;
  EXPECT_NE(error.find("worker 1 for step 1"), std::string::npos) << error;
  EXPECT_NE(update_.Agree(1, kPushNorm, ""), "");
}

TEST_F(RoundUpdateTest, AfterTheNormTheFirstMemberDecides) {
  EXPECT_EQ(update_.Agree(0, kPushNorm, ""), "");
  EXPECT_EQ(update_.Complete(&sum_, {}), "");
  GradientSums sums;
  ASSERT_EQ(update_.sums().size(), sizeof(sums));
  memcpy(&sums, update_.sums().data(), sizeof(sums));
  EXPECT_EQ(sums.squares, 4.0 * kCount);
  EXPECT_EQ(Parameter(), 10);
  EXPECT_EQ(update_.Decide(1, StepWith(0.5), &sum_, &failure_), "");
  EXPECT_EQ(Parameter(), 9);
  EXPECT_EQ(update_.Decide(0, StepWith(0.5), &sum_, &failure_), "") << "made already";
  EXPECT_EQ(Parameter(), 9);
  EXPECT_NE(update_.Decide(0, StepWith(0.25), &sum_, &failure_), "");
  EXPECT_EQ(Parameter(), 9);
}

TEST_F(RoundUpdateTest, AStepThatIsTriedChangesNothing) {
  EXPECT_EQ(update_.Agree(0, kPushTry, StepWith(0.5)), "");
  EXPECT_TRUE(update_.keeps_memory());
  const SharedBytes spare = Filled(0);
  EXPECT_EQ(update_.Complete(&sum_, spare), "");
  EXPECT_EQ(update_.parameters().data(), spare.data()) << "it took more memory";
  EXPECT_EQ(First(update_.parameters()), 9);
  EXPECT_EQ(Parameter(), 10);
  EXPECT_EQ(First(sum_), 2) << "gradients are kept";
}

TEST_F(RoundUpdateTest, ATriedStepIsKeptClippedOrDropped) {
  const struct {
    std::string step;
    float parameter;
    uint64_t redone;
  } cases[] = {
      {StepWith(0.5), 9, 0}, {StepWith(0.5, false, 0.5), 9.5, 1}, {StepWith(0.5, true), 10, 0}};
  for (const auto& one : cases) {
    ASSERT_EQ(state_.Load(0, Filled(10).data()), "");
    ServerCounters counters;
    RoundUpdate update(&declaration_, 3, &state_, &counters);
    SharedBytes sum = Filled(2);
    EXPECT_EQ(update.Agree(0, kPushTry, StepWith(0.5)), "");
    EXPECT_EQ(update.Complete(&sum, {}), "");
    EXPECT_EQ(update.Decide(1, one.step, &sum, &failure_), "");
    EXPECT_EQ(Parameter(), one.parameter);
    EXPECT_EQ(First(sum), one.parameter);
    EXPECT_EQ(counters.redone_partitions.Get(), one.redone);
  }
}

TEST_F(RoundUpdateTest, OnlyAStepThatWasTriedIsOvertaken) {
  EXPECT_EQ(update_.Agree(0, kPushTry, StepWith(0.5)), "");
  update_.Overtake(nullptr);
  EXPECT_FALSE(update_.overtaken());
  EXPECT_EQ(update_.Complete(&sum_, {}), "");
  update_.Overtake(nullptr);
  EXPECT_TRUE(update_.overtaken());
}

}  // namespace
}  // namespace core
}  // namespace byteps
