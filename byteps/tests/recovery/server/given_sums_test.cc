// GivenSums: rounds that began on a lost server, on its successor.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/base/wire.h"
#include "tests/server/optimizer/step_job.h"
#include "tests/support/kit.h"
#include "tests/support/recovering_server.h"

namespace byteps {
namespace core {
namespace {

constexpr uint32_t kBytes = 16;

class GivenTest : public testing::Test {
 protected:
  GivenTest() : server_(ConfigWith({{"BYTEPS_SERVER_ENGINE_THREAD", "1"}}), &answers_) {
    declaration_.name = "tensor";
    declaration_.bytes = declaration_.partition_bytes = kBytes;
    declaration_.group = {0, 1, 2};
  }

  // Makes every rank declare the tensor, and tell the round with which it continues.
  void Resume(const std::vector<uint32_t>& rounds) {
    for (int rank = 0; rank < 3; ++rank) {
      Tell(
          MakeRequest(kDeclare, 0, declaration_.Key(), ++number_, PackDeclarations({declaration_})),
          rank);
      EXPECT_FALSE(answers_.Await(number_).failed);
      WireWriter out;
      out.PutSize(1);
      out.Put(declaration_.Key());
      out.Put(rounds[rank]);
      Tell(MakeRequest(kResume, 0, 0, ++number_, out.Take()), rank);
      EXPECT_FALSE(answers_.Await(number_).failed);
    }
  }

  uint64_t Send(int op, int rank, uint32_t round, const std::vector<float>& values,
                const std::vector<bool>& lacks = {}) {
    PushHeader header;
    header.round = header.oldest = round;
    header.timeout_ms = 600'000;
    header.pull_bytes = op == kPushPull ? kBytes : 0;
    header.flags = PushHeader::kKeepsSums;
    Message message =
        MakeRequest(op, 0, declaration_.Key(), ++number_, header.Pack() + PackMembers(lacks));
    const SharedBytes bytes = SharedBytes::New(values.size() * sizeof(float));
    memcpy(bytes.data(), values.data(), bytes.size());
    message.SetValues(bytes);
    Tell(std::move(message), rank);
    return number_;
  }
  // Each rank's values are a power of two.
  uint64_t Push(int rank, uint32_t round) {
    return Send(kPushPull, rank, round, std::vector<float>(4, static_cast<float>(1 << rank)));
  }
  uint64_t Give(int rank, uint32_t round, float sum, const std::vector<bool>& lacks = {}) {
    return Send(kGiveSum, rank, round, std::vector<float>(4, sum), lacks);
  }

  void Tell(Message request, int rank) {
    request.peer = rank;
    server_.OnMessage(&request);
  }

  void Expect(uint64_t number, float value, uint32_t ended,
              const std::vector<size_t>& missing = {}) {
    const Answers::Answer answer = answers_.Await(number);
    ASSERT_FALSE(answer.failed) << answer.body;
    ASSERT_EQ(answer.values.size(), 4u);
    EXPECT_EQ(answer.values[0], value);
    std::string rest = answer.body;
    KeptAnswer kept;
    ASSERT_TRUE(KeptAnswer::Take(&rest, &kept));
    EXPECT_EQ(kept.ended, ended);
    EXPECT_EQ(UnpackMembers(rest, 3), missing);
  }

  Answers answers_;
  RecoveringServer server_;
  Declaration declaration_;
  uint64_t number_ = 0;
};

TEST_F(GivenTest, ItKeepsTheListOfTheSum) {
  Resume({3, 3, 3});
  server_.SetAbsent({1});  // worker 1 died after its push
  EXPECT_FALSE(answers_.Await(Give(0, 3, 50)).failed);
  Expect(Push(2, 3), 50, 0);
  server_.SetAbsent({});  // worker 1 came back
  EXPECT_FALSE(answers_.Await(Give(0, 4, 60, {false, true, false})).failed);
  Expect(Push(2, 4), 60, 0, {1});
  const uint64_t next[] = {Push(0, 5), Push(2, 5), Push(1, 5)};
  for (const uint64_t number : next) Expect(number, 7, 5);
}

TEST_F(GivenTest, AWorkerThatIsBehindMayComeLast) {
  Resume({9, 9, 8});
  EXPECT_FALSE(answers_.Await(Give(0, 9, 90)).failed);
  EXPECT_FALSE(answers_.Await(Give(2, 8, 80)).failed) << "all have ended it";
  Expect(Push(1, 9), 90, 0);
  Expect(Push(2, 9), 90, 0);
}

TEST_F(GivenTest, WhatMembersHadPartsOfIsLost) {
  Resume({2, 2, 2});
  EXPECT_FALSE(answers_.Await(Send(kGiveSum, 0, 2, {})).failed);
  const uint64_t first = Push(1, 2), second = Push(2, 2);
  for (const uint64_t number : {first, second}) {
    const Answers::Answer answer = answers_.Await(number);
    EXPECT_TRUE(answer.failed);
    EXPECT_NE(answer.body.find("its sum is lost"), std::string::npos) << answer.body;
  }
}

TEST_F(GivenTest, AGiftWithoutMemoryForItFailsByThatName) {
  Resume({2, 2, 2});
  const uint64_t before = Push(1, 2);
  PushHeader header;
  header.round = header.oldest = 2;
  header.flags = PushHeader::kKeepsSums;
  Message gift = MakeRequest(kGiveSum, 0, declaration_.Key(), ++number_, header.Pack());
  gift.sent_bytes = kBytes;  // the link had no memory, and dropped the values
  Tell(std::move(gift), 0);
  for (const uint64_t number : {number_, before}) {
    const Answers::Answer answer = answers_.Await(number);
    EXPECT_TRUE(answer.failed);
    EXPECT_NE(answer.body.find("out of memory"), std::string::npos) << answer.body;
  }
}

TEST_F(GivenTest, PartsAloneThatAllHadHarmNobody) {
  Resume({2, 2, 2});
  for (const int rank : {0, 1, 2}) {
    EXPECT_FALSE(answers_.Await(Send(kGiveSum, rank, 2, {})).failed);
  }
  const uint64_t next[] = {Push(2, 3), Push(1, 3), Push(0, 3)};
  for (const uint64_t number : next) Expect(number, 7, 3);
}

TEST_F(GivenTest, WhatHasNotItsFormIsRefused) {
  Resume({0, 0, 0});
  EXPECT_TRUE(answers_.Await(Send(kGiveSum, 0, 0, {1, 2})).failed) << "half a sum";
  EXPECT_TRUE(answers_.Await(Give(0, 0, 1, std::vector<bool>(64, true))).failed);
  Tell(MakeRequest(kResume, 0, 0, ++number_, "what?"), 0);
  EXPECT_TRUE(answers_.Await(number_).failed);
}

}  // namespace
}  // namespace core
}  // namespace byteps
