// RoundUpdate: requests of the members of a round. Parameters as differences: worker and server
// always agree on the parameters that the worker holds.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "byteps/base/block_codec.h"
#include "byteps/base/dtype.h"
#include "byteps/base/invariant.h"
#include "byteps/server/optimizer/partition_state.h"
#include "byteps/server/optimizer/round_update.h"
#include "byteps/server/optimizer/update.h"

namespace byteps {
namespace core {
namespace {

constexpr size_t kFewValues = 4;
constexpr size_t kFewBytes = kFewValues * sizeof(float);

SharedBytes Filled(float value) {
  const std::vector<float> values(kFewValues, value);
  const SharedBytes bytes = SharedBytes::New(kFewBytes);
  memcpy(bytes.data(), values.data(), kFewBytes);
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

// SGD without momentum; parameters start at 10, gradients are 2.
class RoundUpdateTest : public testing::Test {
 protected:
  RoundUpdateTest() : declaration_(Made()), state_(&declaration_, 0) {
    EXPECT_EQ(state_.Load(0, Filled(10).data()), "");
  }

  static Declaration Made() {
    auto rule = std::make_shared<UpdateRule>();
    rule->algorithm = UpdateRule::kSgd;
    rule->groups = {{}};
    rule->segments = {{kFewValues, 0}};
    rule->speculative = true;
    Declaration declaration;
    declaration.name = "w";
    declaration.bytes = declaration.partition_bytes = kFewBytes;
    declaration.group = {0, 1};
    declaration.rule = rule;
    return declaration;
  }

  float Parameter() {
    SharedBytes values = SharedBytes::New(kFewBytes);
    EXPECT_EQ(state_.Read(0, 0, kFewBytes, values.data()), "");
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
  EXPECT_EQ(sums.squares, 4.0 * kFewValues);
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

// ----- parameters as differences, for every outcome of a step

constexpr uint64_t kBlocks = 70;  // more than are updated at a time
constexpr size_t kCount = kBlocks * kBlockValues;
using Values = std::vector<float>;

Values Random(uint32_t seed, float size) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, size);
  Values values(kCount);
  for (float& value : values) value = normal(random);
  return values;
}

UpdateStep StepOf(uint64_t number, double scale = 1, bool skip = false) {
  UpdateStep step;
  step.number = number;
  step.grad_scale = scale;
  step.skip = skip;
  step.rates = {{0.01, 0.1}, {0.02, 0}};
  return step;
}

// A server's partition, and a worker that holds parameters of a type.
class DifferencesTest : public testing::TestWithParam<DType> {
 protected:
  DifferencesTest() : declaration_(Made(GetParam())), state_(&declaration_, 0) {
    const Values first = Random(1, 1);
    EXPECT_EQ(state_.Load(0, Chars(first)), "");
    held_.resize(kCount * SizeOf(GetParam()));
    RoundParameters(GetParam(), held_.data(), first.data(), kCount);
  }

  static Declaration Made(DType held) {
    auto rule = std::make_shared<UpdateRule>();
    rule->groups = {{0.9, 0.95, 1e-8, false}, {0.9, 0.99, 1e-8, false}};
    // A group ends inside a block.
    rule->segments = {{1000, 0}, {kCount, 1}};
    rule->speculative = true;
    rule->held = held;
    Declaration declaration;
    declaration.name = "w";
    declaration.dtype = DType::kInt4x128;
    declaration.bytes = declaration.partition_bytes = kBlocks * SizeOf(DType::kInt4x128);
    declaration.group = {0, 1};
    declaration.rule = rule;
    return declaration;
  }

  static const char* Chars(const Values& values) {
    return reinterpret_cast<const char*>(values.data());
  }

  static SharedBytes Bytes(const Values& values) {
    SharedBytes bytes = SharedBytes::New(values.size() * sizeof(float));
    memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }

  Values Slot(uint32_t slot) const {
    Values values(kCount);
    EXPECT_EQ(state_.Read(slot, 0, kCount * sizeof(float), reinterpret_cast<char*>(values.data())),
              "");
    return values;
  }
  Values Master() const { return Slot(0); }
  Values HeldOnServer() const { return Slot(declaration_.NumSlots() - 1); }

  // Adds received differences, as a worker does.
  void Take(const SharedBytes& blocks) {
    ASSERT_EQ(blocks.size(), kBlocks * SizeOf(DType::kInt8x128));
    AddDifferences(GetParam(), blocks.data(), held_.data(), kCount, held_.data());
  }
  Values HeldOnWorker() const {
    Values values(kCount);
    WidenParameters(GetParam(), held_.data(), values.data(), kCount);
    return values;
  }

  // Checks the distance between worker and server: at most half a step of the last block, and half
  // a unit in the last place of the worker's type.
  void DemandNear(float largest_difference) const {
    const Values master = Master(), held = HeldOnWorker();
    const float place = GetParam() == DType::kFloat32    ? 0x1p-23f
                        : GetParam() == DType::kBFloat16 ? 0x1p-8f
                                                         : 0x1p-10f;
    for (size_t i = 0; i < kCount; ++i) {
      ASSERT_NEAR(held[i], master[i], largest_difference / 253 + std::abs(master[i]) * place) << i;
    }
  }

  Declaration declaration_;
  PartitionState state_;
  std::vector<char> held_;
  ServerCounters counters_;
  std::string failure_;
};

TEST_P(DifferencesTest, BothSidesHaveTheSameAfterEachStepAndNothingDrifts) {
  EXPECT_EQ(HeldOnServer(), HeldOnWorker());
  for (uint64_t number = 1; number <= 300; ++number) {
    RoundUpdate update(&declaration_, static_cast<uint32_t>(number), &state_, &counters_);
    SharedBytes sum = Bytes(Random(static_cast<uint32_t>(number), 1));
    ASSERT_EQ(update.Agree(0, kPushStep, StepOf(number).Pack()), "");
    ASSERT_EQ(update.Complete(&sum, {}), "");
    Take(sum);
    ASSERT_EQ(HeldOnServer(), HeldOnWorker());
  }
  DemandNear(0.2f);
}

TEST_P(DifferencesTest, AStepThatIsTriedIsKeptMadeAgainOrDropped) {
  const struct {
    const char* what;
    UpdateStep step;
  } cases[] = {{"kept", StepOf(1)}, {"clipped", StepOf(1, 0.25)}, {"dropped", StepOf(1, 1, true)}};
  const Values gradients = Random(2, 1);
  for (const auto& one : cases) {
    SCOPED_TRACE(one.what);
    // Result of the same step, made at once.
    PartitionState alone(&declaration_, 0);
    const Values first = Random(1, 1);
    ASSERT_EQ(alone.Load(0, Chars(first)), "");
    ASSERT_EQ(state_.Load(0, Chars(first)), "");
    RoundParameters(GetParam(), held_.data(), first.data(), kCount);
    RoundUpdate at_once(&declaration_, 0, &alone, &counters_);
    SharedBytes wanted = Bytes(gradients);
    ASSERT_EQ(at_once.Agree(0, kPushStep, one.step.Pack()), "");
    ASSERT_EQ(at_once.Complete(&wanted, {}), "");

    RoundUpdate update(&declaration_, 0, &state_, &counters_);
    SharedBytes sum = Bytes(gradients);
    ASSERT_EQ(update.Agree(0, kPushTry, StepOf(1).Pack()), "");
    ASSERT_EQ(update.Complete(&sum, {}), "");
    const SharedBytes tried = update.parameters();
    ASSERT_EQ(HeldOnServer(), HeldOnWorker()) << "what was tried has changed something";
    ASSERT_EQ(Master(), first);
    ASSERT_EQ(update.Decide(0, one.step.Pack(), &sum, &failure_), "");
    ASSERT_EQ(sum.size(), wanted.size());
    EXPECT_EQ(memcmp(sum.data(), wanted.data(), sum.size()), 0);
    if (one.step.Pack() == StepOf(1).Pack()) {
      EXPECT_EQ(memcmp(tried.data(), wanted.data(), tried.size()), 0) << "the preview differs";
    }
    Take(sum);
    EXPECT_EQ(HeldOnServer(), HeldOnWorker());
    if (one.step.skip) {
      EXPECT_EQ(Master(), first);
    }
  }
}

TEST_P(DifferencesTest, WhatIsLoadedIsWhatWorkersHold) {
  const Values master = Random(7, 1), held = Random(8, 1);
  ASSERT_EQ(state_.Load(0, Chars(master)), "");
  RoundParameters(GetParam(), held_.data(), master.data(), kCount);
  EXPECT_EQ(HeldOnServer(), HeldOnWorker()) << "the parameters, rounded";
  ASSERT_EQ(state_.Load(declaration_.NumSlots() - 1, Chars(held)), "");
  RoundParameters(GetParam(), held_.data(), held.data(), kCount);
  EXPECT_EQ(HeldOnServer(), HeldOnWorker());
  EXPECT_EQ(Master(), master);
  // A range, as workers may ask for it.
  const Values all = HeldOnServer();
  Values part(1000);
  ASSERT_EQ(state_.Read(declaration_.NumSlots() - 1, 77 * sizeof(float), 1000 * sizeof(float),
                        reinterpret_cast<char*>(part.data())),
            "");
  EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + 77));
}

TEST_P(DifferencesTest, ABlockThatIsNotFiniteIsAloneInThat) {
  Values gradients = Random(3, 1);
  for (size_t i = 0; i < kBlockValues; ++i) {
    gradients[kBlockValues + i] = std::numeric_limits<float>::quiet_NaN();
  }
  RoundUpdate update(&declaration_, 0, &state_, &counters_);
  SharedBytes sum = Bytes(gradients);
  ASSERT_EQ(update.Agree(0, kPushStep, StepOf(1).Pack()), "");
  ASSERT_EQ(update.Complete(&sum, {}), "");
  Take(sum);
  const Values server = HeldOnServer(), worker = HeldOnWorker();
  for (size_t i = 0; i < kCount; ++i) {
    const bool is_spoilt = i / kBlockValues == 1;
    ASSERT_EQ(std::isnan(server[i]), is_spoilt) << i;
    ASSERT_EQ(std::isnan(worker[i]), is_spoilt) << i;
    if (!is_spoilt) {
      ASSERT_EQ(server[i], worker[i]) << i;
    }
  }
}

TEST_P(DifferencesTest, MemoryIsThatOfTheStateWhatWorkersHoldAndTheGradients) {
  const uint64_t each = 3 * sizeof(float) + SizeOf(GetParam()) + sizeof(float);
  EXPECT_EQ(StateBytes(declaration_, 0, 1), kCount * each);
}

INSTANTIATE_TEST_SUITE_P(Types, DifferencesTest,
                         testing::Values(DType::kFloat32, DType::kBFloat16, DType::kFloat16),
                         [](const auto& info) { return std::string(NameOf(info.param)); });

// A zero of the worker keeps its sign while nothing is added to it.
TEST(DifferencesCodecTest, NothingLeavesTheBitsAsTheyAre) {
  const std::vector<uint16_t> held(kBlockValues, 0x8000);
  std::vector<uint16_t> moved(kBlockValues);
  const Values wanted(kBlockValues, 0);
  std::vector<char> blocks(SizeOf(DType::kInt8x128));
  EncodeDifferences(DType::kBFloat16, wanted.data(), held.data(), kBlockValues, blocks.data(),
                    moved.data());
  EXPECT_EQ(moved, held);
  AddDifferences(DType::kBFloat16, blocks.data(), held.data(), kBlockValues, moved.data());
  EXPECT_EQ(moved, held);
}

// The last block may be partly filled.
TEST(DifferencesCodecTest, BlocksMayBeFilledUp) {
  for (const uint64_t count : {uint64_t{1}, uint64_t{127}, uint64_t{129}, uint64_t{300}}) {
    const Values all = Random(5, 1);
    const Values wanted(all.begin(), all.begin() + static_cast<int64_t>(count));
    const Values held(count, 0.5f);
    Values moved(count + 1, -7), taken(count + 1, -7);
    std::vector<char> blocks(BlocksOf(count) * SizeOf(DType::kInt8x128));
    EncodeDifferences(DType::kFloat32, wanted.data(), held.data(), count, blocks.data(),
                      moved.data());
    AddDifferences(DType::kFloat32, blocks.data(), held.data(), count, taken.data());
    EXPECT_EQ(moved, taken);
    EXPECT_EQ(moved[count], -7) << "it wrote behind the values";
    for (uint64_t i = 0; i < count; ++i) EXPECT_NEAR(moved[i], wanted[i], 5.0f / 253) << i;
  }
}

}  // namespace
}  // namespace core
}  // namespace byteps
