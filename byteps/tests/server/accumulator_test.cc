// Accumulator: addition of the pushes of a round.
#include "byteps/server/accumulator.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "byteps/base/block_codec.h"
#include "byteps/base/invariant.h"
#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/server/scratch.h"
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
  declaration.group = RankGroup::Below(members);
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

// Closes sums that only some members have pushed, in every order.
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

// The sum of these values overflows, their average does not.
template <typename T>
void ExpectAverageOf(DType type, T value) {
  for (uint32_t members = 2; members <= 5; ++members) {
    for (uint32_t present = 1; present <= members; ++present) {
      Declaration declaration = Of(members, true);
      declaration.dtype = type;
      Scratch scratch;
      Accumulator accumulator;
      for (uint32_t member = 0; member < present; ++member) {
        const T given = member == 0 ? value / 2 : value;
        const SharedBytes bytes = SharedBytes::New(sizeof(T));
        memcpy(bytes.data(), &given, sizeof(T));
        accumulator.Take(declaration, {}, member, bytes, &scratch);
      }
      if (present < members) accumulator.Close(declaration, {}, &scratch);
      T found;
      memcpy(&found, accumulator.sum().data(), sizeof(T));
      __extension__ using Wide = __int128;
      const Wide sum = Wide{value / 2} + Wide{value} * (present - 1), count = present;
      const Wide below = sum % count < 0 ? 1 : 0;
      EXPECT_EQ(found, static_cast<T>(sum / count - below))
          << NameOf(type) << " of " << present << " of " << members;
    }
  }
}

TEST(Accumulator, AveragesIntegersWhoseSumOverflows) {
  ExpectAverageOf<uint8_t>(DType::kUInt8, UINT8_MAX);
  ExpectAverageOf<int8_t>(DType::kInt8, INT8_MAX);
  ExpectAverageOf<int8_t>(DType::kInt8, INT8_MIN);
  ExpectAverageOf<int32_t>(DType::kInt32, INT32_MAX);
  ExpectAverageOf<int32_t>(DType::kInt32, INT32_MIN);
  ExpectAverageOf<int64_t>(DType::kInt64, INT64_MAX);
  ExpectAverageOf<int64_t>(DType::kInt64, INT64_MIN);
}

// A sum in which members are missing is encoded in blocks like any other sum.
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

// Sums for updates are fp32: they are scaled in fp32, and not rounded to blocks.
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

// 1, 2^24 and -2^24 in fp32: the sum depends on the order of additions.
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

// Up to kAtOnce pushes in a single pass, beyond that in several.
TEST(Accumulator, AddsBlocksOfFewBitsHoweverMany) {
  constexpr uint64_t kValues = 3 * kBlockValues;
  for (const DType type : {DType::kInt8x128, DType::kInt4x128}) {
    for (const uint32_t members : {1, 2, 7, 8, 9, 16, 17, 25}) {
      Declaration declaration = Of(members, true);
      declaration.dtype = type;
      declaration.bytes = declaration.partition_bytes = BlocksOf(kValues) * SizeOf(type);
      Scratch scratch;
      Accumulator accumulator;
      // Integers, each the largest of its block: encoding loses nothing.
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

}  // namespace
}  // namespace core
}  // namespace byteps
