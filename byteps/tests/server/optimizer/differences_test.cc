// Parameters as differences: worker and server always agree on the parameters that the worker
// holds, whatever becomes of a step.
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

  // Checks the distance between the worker's and the server's values: at most half a step of the
  // last block, and half a unit in the last place of the worker's type.
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
    const uint64_t redone = counters_.redone_partitions.Get();
    ASSERT_EQ(update.Decide(0, one.step.Pack(), &sum, &failure_), "");
    EXPECT_EQ(counters_.redone_partitions.Get() - redone, one.step.grad_scale < 1 ? 1U : 0U);
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

TEST_P(DifferencesTest, OnlyAStepThatWasTriedIsOvertaken) {
  RoundUpdate update(&declaration_, 0, &state_, &counters_);
  SharedBytes sum = Bytes(Random(2, 1));
  ASSERT_EQ(update.Agree(0, kPushTry, StepOf(1).Pack()), "");
  update.Overtake(nullptr);
  EXPECT_FALSE(update.overtaken());
  ASSERT_EQ(update.Complete(&sum, {}), "");
  update.Overtake(nullptr);
  EXPECT_TRUE(update.overtaken());
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
