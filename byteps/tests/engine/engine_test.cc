// A worker's sums and declarations, over scripted servers.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
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

TEST(Engine, OneThatJoinsGoesOnInTheLivesOfOthers) {
  Job donor(1), joiner(1);
  auto values = Values(100, 1);
  for (int life = 0; life < 2; ++life) {
    donor.Wait(donor.Start("x", &values));
    if (life == 0) donor.worker.Release({"x"}, 0);
  }
  joiner.worker.Declare({Job::RequestFor("x", &values).tensor});
  const uint64_t too_early = joiner.channel->declarations(0).front().front().Key();
  joiner.worker.SetRounds(donor.worker.Rounds());
  EXPECT_EQ(joiner.channel->releases(), (std::vector<std::pair<uint64_t, int>>{{too_early, 0}}));
  TensorPtr known;
  joiner.Wait(joiner.worker.PushPull(Job::RequestFor("x", &values), &known));
  EXPECT_EQ(known->declaration.releases, 1U);
  EXPECT_EQ(joiner.worker.Rounds(), (ProgressByTensor{{"0/x", {1, 2}}}));
}

TEST(Engine, WhatIsKnownOfATensorIsOfOneJob) {
  TensorPtr known;
  for (int jobs = 0; jobs < 2; ++jobs) {
    Job job(2);
    auto values = Values(5000, jobs);
    const auto wanted = Times(Times(values, 3), 3);
    const auto request = Job::RequestFor("x", &values);
    const TensorPtr of_another = known;
    job.Wait(job.worker.PushPull(request, &known));
    EXPECT_NE(known, of_another);
    const TensorPtr of_this = known;
    job.Wait(job.worker.PushPull(request, &known));
    EXPECT_EQ(known, of_this);
    EXPECT_EQ(values, wanted);
    EXPECT_EQ(job.channel->declarations(0).size(), 1U);
    EXPECT_EQ(known->rounds, 2U);
  }
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

// The push loop is delayed between sending and recording the slice. Meanwhile all other work ends.
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

// ----- declarations

std::vector<TensorSpec> ManySpecs(int count) {
  std::vector<TensorSpec> specs;
  for (int i = 0; i < count; ++i) {
    TensorSpec spec;
    spec.name = "d" + std::to_string(i);
    spec.bytes = 40000;
    spec.placement = 0;
    if (i % 2) spec.group = {0, 2};
    specs.push_back(spec);
  }
  return specs;
}

TEST(Declarations, OneMessageForManyTensors) {
  Job job(4);
  job.worker.Declare(ManySpecs(500));
  job.worker.Declare(ManySpecs(500));  // known already
  for (int server = 0; server < 4; ++server) {
    const auto messages = job.channel->declarations(server);
    ASSERT_EQ(messages.size(), 1u);
    ASSERT_EQ(messages[0].size(), 500u);
    EXPECT_EQ(messages[0][3].name, "d3");
    EXPECT_EQ(messages[0][3].group, std::vector<uint32_t>({0, 2}));
    EXPECT_EQ(messages[0][2].group, std::vector<uint32_t>({0, 1, 2}));
  }
  auto values = Values(10000, 1);
  const auto sum = Times(values, 3);
  job.Wait(job.Start("d0", &values));
  EXPECT_EQ(values, sum);
  EXPECT_EQ(job.channel->declarations(0).size(), 1u);
}

TEST(Declarations, ManyThreadsDeclareEachTensorOnce) {
  Job job(2);
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&] { job.worker.Declare(ManySpecs(50)); });
  }
  for (auto& thread : threads) thread.join();
  std::map<std::string, int> seen;
  for (const auto& message : job.channel->declarations(1)) {
    for (const auto& d : message) ++seen[d.name];
  }
  EXPECT_EQ(seen.size(), 50u);
  for (const auto& entry : seen) EXPECT_EQ(entry.second, 1) << entry.first;
}

TEST(Declarations, RefusalIsToldAndMayBeTriedAgain) {
  Script script;
  script.refusal = "workers disagree";
  Job job(2, script);
  auto values = Values(10, 1);
  try {
    job.Start("x", &values);
    FAIL() << "was accepted";
  } catch (const Error& e) {
    EXPECT_TRUE(Has(e.what(), "workers disagree")) << e.what();
  }
  job.channel->Change([](Script* s) { s->refusal.clear(); });
  job.Wait(job.Start("x", &values));
}

TEST(Declarations, SilenceEndsAndNamesTheServer) {
  Script script;
  script.drops_declarations = true;
  Job job(2, script, {{"BYTEPS_OP_TIMEOUT_S", "0.3"}});
  try {
    job.worker.Declare(ManySpecs(3));
    FAIL() << "was accepted";
  } catch (const Error& e) {
    EXPECT_TRUE(Has(e.what(), "'d0' and 2 more timed out: server 0")) << e.what();
    EXPECT_TRUE(Has(e.what(), "BYTEPS_OP_TIMEOUT_S")) << e.what();
  }
}

TEST(Declarations, OneNameIsOneTensor) {
  Job job(1);
  auto values = Values(10, 1), longer = Values(11, 1);
  job.Wait(job.Start("x", &values));
  EXPECT_THROW(job.Start("x", &longer), UsageError);
}

}  // namespace
}  // namespace core
}  // namespace byteps
