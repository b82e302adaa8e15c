// A worker of which something fails: its peers, its job, a server that another one replaces, or an
// operation.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/device/fake.h"
#include "tests/support/job.h"
#include "tests/support/kit.h"

namespace byteps {
namespace core {
namespace {

TEST(Failure, OfOnePushEndsItsOperationAlone) {
  Job job(1);
  auto bad = Values(9000, 1), good = Values(9000, 2);
  const auto sum = Times(good, 3);
  job.channel->Change([](Script* s) { s->failure = "worker 2 left"; });
  const int64_t handle = job.Start("bad", &bad);
  EXPECT_TRUE(Has(job.ErrorOf(handle), "worker 2 left"));
  job.channel->Change([](Script* s) { s->failure.clear(); });
  job.Wait(job.Start("good", &good));
  EXPECT_EQ(good, sum);
}

TEST(Failure, OfTheJobEndsEverything) {
  Job job(2);
  auto first = Values(3000, 1), second = Values(3000, 2);
  job.Wait(job.Start("first", &first));
  job.channel->HoldServer(-1, false);
  const int64_t handle = job.Start("first", &second);
  ASSERT_TRUE(job.channel->AwaitHeld(3));
  job.channel->FailJob("worker 1 was lost");
  job.channel->FailJob("something else");
  EXPECT_EQ(job.ErrorOf(handle), "worker 1 was lost");
  EXPECT_THROW(job.Start("first", &second), Error);
  EXPECT_TRUE(job.worker.failed());
  job.worker.Stop(false);
  EXPECT_FALSE(job.worker.started());
}

// After a failed Wait the memory may be anybody's.
TEST(Failure, NothingIsWrittenAfterwards) {
  for (const bool in_place : {true, false}) {
    Script script;
    script.in_place = in_place;
    script.chunk = 64;
    script.chunk_us = 200;
    // One partition, so that what is awaited below is all that reads the tensor.
    Job job(1, script,
            {{"BYTEPS_PARTITION_BYTES", "1048576"}, {"BYTEPS_MIN_PARTITION_BYTES", "1048576"}});
    auto values = Values(100'000, 1);  // 1.25 s to receive in place
    if (!in_place) job.channel->HoldServer(-1, false);
    const int64_t handle = job.Start("x", &values);
    if (in_place) {
      ASSERT_TRUE(job.channel->AwaitPlacing());
    } else {
      ASSERT_TRUE(job.channel->AwaitHeld(1));
    }
    job.channel->FailJob("gone");
    EXPECT_EQ(job.ErrorOf(handle), "gone");
    std::fill(values.begin(), values.end(), -1.0f);
    job.channel->Change([](Script* s) { s->chunk_us = 0; });
    job.channel->Release();
    job.worker.Stop(false);
    EXPECT_EQ(std::count(values.begin(), values.end(), -1.0f), 100'000) << in_place;
  }
}

TEST(Failure, LateAnswersNameTheServer) {
  auto values = Values(100, 1);  // longer than the worker, which may still send what has failed
  Job job(2, {}, {{"BYTEPS_OP_TIMEOUT_S", "0.1"}});
  job.worker.Declare({Job::RequestFor("x", &values).tensor});
  job.channel->HoldServer(0, false);
  const std::string error = job.ErrorOf(job.Start("x", &values));
  EXPECT_TRUE(Has(error, "'x' timed out: no answer from server 0")) << error;
}

TEST(Failure, OfWhatWaitsBehindOthersNamesTheirServer) {
  // Longer than the worker, which may still send what has failed. One partition each, on server 0.
  auto first = Values(1024, 1), second = Values(1024, 2);
  Job job(2, {}, {{"BYTEPS_OP_TIMEOUT_S", "0.1"}, {"BYTEPS_SERVER_WINDOW_BYTES", "4096"}});
  job.worker.Declare({Job::RequestFor("x", &first).tensor, Job::RequestFor("y", &second).tensor});
  job.channel->HoldServer(0, true);
  const int64_t ahead = job.Start("x", &first);
  const std::string error = job.ErrorOf(job.Start("y", &second));
  EXPECT_TRUE(Has(error,
                  "'y' timed out: no answer from server 0, which does not take what was "
                  "sent to it before, after"))
      << error;
  EXPECT_TRUE(Has(job.ErrorOf(ahead), "'x' timed out: no answer from server 0 after"));
}

TEST(Failure, StopWhileOthersCall) {
  for (int i = 0; i < 20; ++i) {
    // Longer than the worker: what it has failed may still be sent.
    std::vector<std::vector<float>> all;
    for (int t = 0; t < 3; ++t) all.push_back(Values(3000, t));
    Job job(2);
    std::vector<std::thread> callers;
    for (int t = 0; t < 3; ++t) {
      callers.emplace_back([&job, &values = all[t], t] {
        try {
          for (int n = 0;; ++n) {
            const std::string name = std::to_string(t) + "." + std::to_string(n);
            if (!job.worker.WaitFor(job.Start(name, &values), nullptr, kPatience)) return;
          }
        } catch (const Error&) {
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(i));
    job.worker.Stop(false);
    for (auto& caller : callers) caller.join();
  }
}

// ----- a server is lost, and another one takes its place (engine/pusher.cc)

// Tests of broken devices keep memory for ever; that of partitions of this length is another pool.
constexpr size_t kLength = 16 * kPage;
constexpr size_t kPartitions = 6;
constexpr size_t kCount = kPartitions * kLength / sizeof(float);
const Settings kGoesOn = {{"BYTEPS_REPLACE_SERVERS_S", "60"},
                          {"BYTEPS_PARTITION_BYTES", std::to_string(kLength)},
                          {"BYTEPS_PINNED_BYTES", std::to_string(16 * kLength)},
                          {"BYTEPS_STREAMED_BYTES", std::to_string(64 << 20)}};

// Where its tensors are: on the CPU, on a GPU, or on one whose streams alone wait.
enum class Where { kHost, kGpu, kStreamed };

class ServerLossTest : public testing::TestWithParam<Where> {
 protected:
  ServerLossTest() : job_(2, {}, kGoesOn) {
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
  // A round of which nothing is lost.
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

TEST_P(ServerLossTest, WhatWasNotAnsweredIsPushedAgain) {
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
  // Of the round before all have heard; of that one this worker alone may have.
  const auto gifts = job_.channel->gifts();
  EXPECT_EQ(gifts.size(), each);
  for (const auto& [key, round] : gifts) EXPECT_EQ(round, 1u);
  Sum();
}

TEST_P(ServerLossTest, NothingIsSentBetween) {
  Sum();
  job_.channel->LoseServer(0);
  const size_t before = PushesOf(0);
  auto values = Values(kCount, 1);
  const auto sum = Times(values, 3);
  const int64_t handle = Begin(&values);
  ASSERT_TRUE(job_.channel->AwaitPushes(3 * kPartitions / 2));  // those of the other one
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(job_.worker.Poll(handle));
  EXPECT_EQ(PushesOf(0), before);
  job_.channel->ReplaceServer(0);
  End(handle);
  EXPECT_EQ(values, sum);
}

TEST_P(ServerLossTest, AnswersOfTheLostOneAreTooLate) {
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

TEST_P(ServerLossTest, OneThatIsLostAgainIsReplacedAgain) {
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

INSTANTIATE_TEST_SUITE_P(Tensors, ServerLossTest,
                         testing::Values(Where::kHost, Where::kGpu, Where::kStreamed));

TEST(ServerLossWithoutIt, EndsTheJob) {
  Job job(1);
  auto values = Values(4, 1);
  job.Wait(job.Start("x", &values));
  job.channel->LoseServer(0);
  try {
    job.Start("x", &values);
    ADD_FAILURE() << "the next sum was begun";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("set BYTEPS_REPLACE_SERVERS_S on all nodes"),
              std::string::npos)
        << e.what();
  }
}

TEST(ServerLossWithAPart, GivesNoSum) {
  Job job(1, {}, kGoesOn);
  auto values = Values(kCount, 1);
  PushPullRequest request = Job::RequestFor("x", &values);
  request.pull_begin = kLength;
  request.pull_end = 2 * kLength + 4;
  job.Wait(job.worker.PushPull(request));
  // One partition whole, four bytes of another one, and nothing of the others.
  EXPECT_EQ(job.Metric("kept_bytes"), kLength);
}

}  // namespace
}  // namespace core
}  // namespace byteps
