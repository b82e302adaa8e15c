// ServerReplacement: a worker goes on with the successor of a lost server.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "byteps/device/fake.h"
#include "tests/support/job.h"
#include "tests/support/kit.h"

namespace byteps {
namespace core {
namespace {

// Tests of broken devices never return their memory; another partition size uses another pool.
constexpr size_t kLength = 16 * kPage;
constexpr size_t kPartitions = 6;
constexpr size_t kCount = kPartitions * kLength / sizeof(float);
const Settings kGoesOn = {{"BYTEPS_REPLACE_SERVERS_S", "60"},
                          {"BYTEPS_PARTITION_BYTES", std::to_string(kLength)},
                          {"BYTEPS_PINNED_BYTES", std::to_string(16 * kLength)},
                          {"BYTEPS_STREAMED_BYTES", std::to_string(64 << 20)}};

// Place of a worker's tensors: the CPU, a GPU, or a GPU with streamed sums.
enum class Where { kHost, kGpu, kStreamed };

class ServerReplacementTest : public testing::TestWithParam<Where> {
 protected:
  ServerReplacementTest() : job_(2, {}, kGoesOn) {
    fake::SetCurrentDevice(0);
    if (GetParam() != Where::kHost) stream_ = MakeStream();
  }

  int64_t Begin(std::vector<float>* values) {
    const int device = GetParam() == Where::kHost ? kCpu : 0;
    PushPullRequest request = Job::RequestFor("x", values, device, stream_);
    request.streamed = GetParam() == Where::kStreamed;
    return job_.worker.PushPull(request);
  }
  void End(int64_t handle) {
    job_.Wait(handle, stream_);
    if (stream_ != nullptr) fake::Synchronize(stream_);
  }
  // A round without losses.
  void Sum() {
    auto values = Values(kCount, 1);
    const auto sum = Times(values, 3);
    End(Begin(&values));
    EXPECT_EQ(values, sum);
  }
  size_t PushesOf(int server) {
    const auto pushes = job_.channel->pushes();
    return std::count_if(pushes.begin(), pushes.end(),
                         [=](const auto& push) { return push.second == server; });
  }

  Job job_;
  DeviceStream stream_ = nullptr;
};

TEST_P(ServerReplacementTest, WhatWasNotAnsweredIsPushedAgain) {
  Sum();
  Sum();
  const size_t each = PushesOf(0) / 2;
  job_.channel->HoldServer(0, false);
  auto values = Values(kCount, 1);
  const auto sum = Times(values, 3);
  const int64_t handle = Begin(&values);
  ASSERT_TRUE(job_.channel->AwaitHeld(each));
  job_.channel->LoseServer(0);
  EXPECT_EQ(job_.channel->declarations(0).size(), 1u);
  job_.channel->ReplaceServer(0);
  End(handle);
  EXPECT_EQ(values, sum);
  EXPECT_EQ(job_.channel->declarations(0).size(), 2u) << "the new one knows nothing";
  EXPECT_EQ(PushesOf(0), 4 * each);
  // All members have the round before; perhaps only this worker has the sum of this round.
  const auto gifts = job_.channel->gifts();
  EXPECT_EQ(gifts.size(), each);
  for (const auto& [key, round] : gifts) EXPECT_EQ(round, 1u);
  Sum();
}

TEST_P(ServerReplacementTest, NothingIsSentBetween) {
  Sum();
  job_.channel->LoseServer(0);
  const size_t before = PushesOf(0);
  auto values = Values(kCount, 1);
  const auto sum = Times(values, 3);
  const int64_t handle = Begin(&values);
  ASSERT_TRUE(job_.channel->AwaitPushes(3 * kPartitions / 2));  // pushes to the other server
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(job_.worker.Poll(handle));
  EXPECT_EQ(PushesOf(0), before);
  job_.channel->ReplaceServer(0);
  End(handle);
  EXPECT_EQ(values, sum);
}

TEST_P(ServerReplacementTest, AnswersOfTheLostOneAreTooLate) {
  job_.channel->HoldServer(0, false);
  auto values = Values(kCount, 1);
  const auto sum = Times(values, 3);
  const int64_t handle = Begin(&values);
  ASSERT_TRUE(job_.channel->AwaitHeld(kPartitions / 2));
  job_.channel->LoseServer(0, false);
  job_.channel->Release();
  job_.channel->ReplaceServer(0);
  End(handle);
  EXPECT_EQ(values, sum);
  EXPECT_TRUE(job_.channel->gifts().empty());
}

TEST_P(ServerReplacementTest, OneThatIsLostAgainIsReplacedAgain) {
  Sum();
  auto values = Values(kCount, 1);
  const auto sum = Times(values, 3);
  job_.channel->HoldServer(0, false);
  const int64_t handle = Begin(&values);
  ASSERT_TRUE(job_.channel->AwaitHeld(kPartitions / 2));
  job_.channel->LoseServer(0);
  for (int i = 0; i < 3; ++i) {
    job_.channel->ReplaceServer(0);
    job_.channel->LoseServer(0);
  }
  job_.channel->ReplaceServer(0);
  End(handle);
  EXPECT_EQ(values, sum);
  Sum();
}

INSTANTIATE_TEST_SUITE_P(Tensors, ServerReplacementTest,
                         testing::Values(Where::kHost, Where::kGpu, Where::kStreamed));

TEST(ServerReplacement, GivesNoSumOfWhichItWantedAPart) {
  Job job(1, {}, kGoesOn);
  auto values = Values(kCount, 1);
  PushPullRequest request = Job::RequestFor("x", &values);
  request.pull_begin = kLength;
  request.pull_end = 2 * kLength + 4;
  job.Wait(job.worker.PushPull(request));
  // A whole partition, four bytes of another, and nothing of the rest.
  EXPECT_EQ(job.Metric("kept_bytes"), kLength);
}

}  // namespace
}  // namespace core
}  // namespace byteps
