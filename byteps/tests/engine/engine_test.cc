// Sums of a worker, over servers that a script plays.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/job.h"

namespace byteps {
namespace core {
namespace {

TEST(Engine, ManySumsInEveryOrder) {
  for (const bool in_place : {true, false}) {
    Script script;
    script.in_place = in_place;
    script.shuffled = true;
    Job job(3, script);
    std::vector<std::vector<float>> tensors;
    for (int i = 0; i < 40; ++i) tensors.push_back(Values(1 + 700 * i, i));
    auto wanted = tensors;
    std::vector<int64_t> handles;
    for (int i = 0; i < 40; ++i) {
      handles.push_back(job.Start("t" + std::to_string(i), &tensors[i], kCpu, nullptr, i % 3));
    }
    std::reverse(handles.begin(), handles.end());
    for (const int64_t handle : handles) job.Wait(handle);
    for (int i = 0; i < 40; ++i) EXPECT_EQ(tensors[i], Times(wanted[i], 3)) << i;
    EXPECT_EQ(job.Metric(in_place ? "copied_bytes_total" : "placed_bytes_total"), 0);
    EXPECT_EQ(job.Metric("operations_total"), 40);
    EXPECT_EQ(job.Metric("unanswered_requests"), 0);
    EXPECT_TRUE(job.Settles("transport_partitions", 0));
  }
}

TEST(Engine, LargeValuesThatDidNotLandAreCopiedByPullLoops) {
  Script script;
  script.in_place = false;
  Job job(1, script, {{"BYTEPS_PARTITION_BYTES", "1048576"}});
  auto values = Values(1'000'000, 1);
  const auto wanted = Times(values, 3);
  job.Wait(job.Start("x", &values));
  EXPECT_EQ(values, wanted);
  EXPECT_EQ(job.Metric("copied_bytes_total"), 4e6);
}

TEST(Engine, OnlyTheWantedPartIsWritten) {
  Job job(2);
  auto values = Values(5000, 1);
  const auto before = values;
  auto request = Job::RequestFor("x", &values);
  request.pull_begin = 4 * 1500;
  request.pull_end = 4 * 2700;
  job.Wait(job.worker.PushPull(request));
  for (int i = 0; i < 5000; ++i) {
    ASSERT_EQ(values[i], before[i] * (i >= 1500 && i < 2700 ? 3 : 1)) << i;
  }
  request.pull_begin = request.pull_end = 100;
  job.Wait(job.worker.PushPull(request));
}

TEST(Engine, RoundsOfOneNameInFlight) {
  Script script;
  script.shuffled = true;
  Job job(2, script);
  std::vector<std::vector<float>> rounds;
  for (int i = 0; i < 5; ++i) rounds.push_back(Values(6000, i));
  const auto wanted = rounds;
  std::vector<int64_t> handles;
  for (auto& values : rounds) handles.push_back(job.Start("x", &values));
  for (const int64_t handle : handles) job.Wait(handle);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(rounds[i], Times(wanted[i], 3)) << i;
}

TEST(Engine, HandlesAreGoneOnceWaitedFor) {
  Job job(1);
  auto values = Values(10, 1);
  const int64_t handle = job.Start("x", &values);
  job.Wait(handle);
  EXPECT_THROW(job.worker.Poll(handle), UsageError);
  EXPECT_THROW(job.worker.WaitFor(handle, nullptr, kPatience), UsageError);
  EXPECT_THROW(job.worker.Poll(1 << 30), UsageError);
  std::vector<float> nothing;
  job.Wait(job.Start("nothing", &nothing));
}

TEST(Engine, SlowServerHoldsUpNobodyElse) {
  Job job(3, {}, {{"BYTEPS_SERVER_WINDOW_BYTES", std::to_string(2 * kPage)}});
  job.channel->HoldServer(1, true);
  auto slow = Values(3 * 1024 * 10, 1), other = Values(1024, 2);
  const auto slow_sum = Times(slow, 3), other_sum = Times(other, 3);
  const int64_t waiting = job.Start("slow", &slow);
  ASSERT_TRUE(job.channel->AwaitPushes(10 + 10 + 2));  // all but 8 of server 1's
  job.Wait(job.Start("other", &other));                // of server 0
  EXPECT_EQ(other, other_sum);
  EXPECT_FALSE(job.worker.Poll(waiting));
  EXPECT_TRUE(job.Settles("push_queue_partitions", 8));
  EXPECT_TRUE(job.Settles("transport_partitions", 2));
  job.channel->Release();
  job.Wait(waiting);
  EXPECT_EQ(slow, slow_sum);
}

TEST(Engine, AnswersDoNotHoldTheWindow) {
  Job job(1, {}, {{"BYTEPS_SERVER_WINDOW_BYTES", std::to_string(kPage)}});
  job.channel->HoldServer(0, false);
  auto values = Values(1024 * 20, 1);
  const auto sum = Times(values, 3);
  const int64_t handle = job.Start("x", &values);
  ASSERT_TRUE(job.channel->AwaitPushes(20)) << "pushes waited for answers";
  EXPECT_FALSE(job.worker.Poll(handle));
  job.channel->Release();
  job.Wait(handle);
  EXPECT_EQ(values, sum);
}

// A loop is held up between sending a push and telling the timeline, and all ends meanwhile.
TEST(Engine, ATimelineHasThePushesThatAreToldLate) {
  const auto folder =
      std::filesystem::temp_directory_path() / ("timeline-" + std::to_string(getpid()));
  Script script;
  script.linger_ms = 200;
  {
    Job job(3, script,
            {{"BYTEPS_TRACE_ON", "1"},
             {"BYTEPS_TRACE_DIR", folder.string()},
             {"BYTEPS_PARTITION_BYTES", "4096"}});
    auto values = Values(3000, 1);  // three partitions
    EXPECT_TRUE(job.worker.WaitFor(job.Start("x", &values), nullptr, kPatience));
    job.worker.Stop(false);
  }
  std::ifstream file(folder / "byteps-worker-0.json");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  int pushes = 0;
  for (size_t at = 0; (at = text.find("\"ph\":\"s\"", at)) != text.npos; ++at) ++pushes;
  EXPECT_EQ(pushes, 3) << text;
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace core
}  // namespace byteps
