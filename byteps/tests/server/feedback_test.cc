// Rounding errors on a server, read and loaded into another server.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/block_codec.h"
#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/server/sum_server.h"
#include "tests/server/optimizer/step_job.h"
#include "tests/support/kit.h"

namespace byteps {
namespace core {
namespace {

using step_tests::Values;

constexpr size_t kBlocks = 2;
constexpr size_t kValuesOfSum = kBlocks * kBlockValues;

// A server with one tensor of int4 blocks, in one partition, summed by two workers.
class SumJob {
 public:
  explicit SumJob(bool feedback = true)
      : server_(ConfigWith({{"BYTEPS_SERVER_ENGINE_THREAD", "1"}}), &answers_) {
    declaration_.name = "tensor";
    declaration_.dtype = DType::kInt4x128;
    declaration_.feedback = feedback;
    declaration_.bytes = declaration_.partition_bytes = kBlocks * SizeOf(declaration_.dtype);
    declaration_.group = {0, 1};
    for (const int rank : {0, 1}) {
      Message told =
          MakeRequest(kDeclare, 0, declaration_.Key(), ++number_, PackDeclarations({declaration_}));
      EXPECT_FALSE(Await(std::move(told), rank).failed);
    }
  }

  // Bits of the sum.
  std::string Sum(uint32_t round) {
    for (const int rank : {0, 1}) {
      std::vector<float> values(kValuesOfSum);
      for (size_t i = 0; i < kValuesOfSum; ++i) {
        values[i] = static_cast<float>((i * 13 + rank * 5 + round * 3) % 29) - 14;
      }
      const SharedBytes blocks = SharedBytes::New(declaration_.bytes);
      EncodeBlocks(declaration_.dtype, blocks.data(), DType::kFloat32, values.data(), kValuesOfSum,
                   nullptr);
      Message push = Request(kPushPull, round, 0, static_cast<uint32_t>(declaration_.bytes));
      push.SetValues(blocks);
      Tell(std::move(push), rank);
    }
    const Values values = answers_.Await(number_).values;
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
  }

  Answers::Answer Read(uint32_t first, uint32_t count) {
    return Await(Request(kReadState, 0, first * sizeof(float), count * sizeof(float)), 1);
  }

  Answers::Answer Load(const Values& values) {
    const SharedBytes bytes = SharedBytes::New(values.size() * sizeof(float));
    memcpy(bytes.data(), values.data(), bytes.size());
    Message load = Request(kLoadState, 0, 0, 0);
    load.SetValues(bytes);
    return Await(std::move(load), 0);
  }

 private:
  Message Request(int op, uint32_t round, uint32_t offset, uint32_t bytes) {
    PushHeader header;
    header.round = round;
    header.timeout_ms = 60'000;
    header.pull_offset = offset;
    header.pull_bytes = bytes;
    return MakeRequest(op, 0, declaration_.Key(), ++number_, header.Pack());
  }

  void Tell(Message message, int rank) {
    message.peer = rank;
    server_.OnMessage(&message);
  }

  Answers::Answer Await(Message message, int rank) {
    const uint64_t number = message.number;
    Tell(std::move(message), rank);
    return answers_.Await(number);
  }

  Answers answers_;
  SumServer server_;
  Declaration declaration_;
  uint64_t number_ = 0;
};

TEST(FeedbackTest, AServerGoesOnWhereAnotherOneStopped) {
  SumJob first, second, third;
  EXPECT_EQ(first.Read(0, kValuesOfSum).values, Values(kValuesOfSum));
  for (uint32_t round = 0; round < 3; ++round) first.Sum(round);
  const Values lost = first.Read(0, kValuesOfSum).values;
  EXPECT_NE(lost, Values(kValuesOfSum));
  EXPECT_EQ(first.Read(40, 7).values, Values(lost.begin() + 40, lost.begin() + 47));
  ASSERT_FALSE(second.Load(lost).failed);
  const std::string fourth = first.Sum(3);
  EXPECT_EQ(second.Read(0, kValuesOfSum).values, lost);
  // Give the second server another history first.
  for (uint32_t round = 0; round < 3; ++round) {
    second.Sum(round);
    third.Sum(round);
  }
  ASSERT_FALSE(second.Load(lost).failed);
  EXPECT_EQ(second.Sum(3), fourth);
  ASSERT_FALSE(third.Load(Values(kValuesOfSum)).failed);
  EXPECT_NE(third.Sum(3), fourth);
}

TEST(FeedbackTest, OtherFormsAreRefused) {
  SumJob job;
  EXPECT_TRUE(job.Load(Values(kValuesOfSum - 1)).failed);
  EXPECT_TRUE(job.Read(kValuesOfSum, 1).failed);
  EXPECT_FALSE(job.Read(kValuesOfSum - 1, 1).failed);
  SumJob plain(false);
  EXPECT_TRUE(plain.Load(Values(kValuesOfSum)).failed);
  EXPECT_TRUE(plain.Read(0, 1).failed);
}

}  // namespace
}  // namespace core
}  // namespace byteps
