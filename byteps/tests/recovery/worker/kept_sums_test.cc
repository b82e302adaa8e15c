// Tests of KeptSums: how long a worker keeps sums for other workers, and how a successor gets them.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/job.h"

namespace byteps {
namespace core {
namespace {

const Settings kGoesOn = {{"BYTEPS_REPLACE_SERVERS_S", "60"}};
constexpr size_t kPage4 = kPage / sizeof(float);

void SumOnce(Job* job, const std::string& name, size_t pages) {
  auto values = Values(pages * kPage4, 1);
  const auto wanted = Times(values, 3);
  job->Wait(job->Start(name, &values));
  EXPECT_EQ(values, wanted);
}

// Tensors that are summed only once.
TEST(KeptSums, OneOffSumsGoWhenAllHaveThem) {
  Script script;
  script.threads = 1;
  script.all_confirm = true;
  Job job(2, script, kGoesOn);
  for (int i = 0; i < 20; ++i) SumOnce(&job, "once." + std::to_string(i), 8);
  // The last answer of each server.
  EXPECT_LE(job.Metric("kept_bytes"), 2 * kPage);
}

TEST(KeptSums, OneOffSumsStayWhileAMemberMayLackThem) {
  Job job(2, {}, kGoesOn);
  for (int i = 0; i < 20; ++i) SumOnce(&job, "once." + std::to_string(i), 8);
  EXPECT_EQ(job.Metric("kept_bytes"), 20 * 8 * kPage);
  // All members of this server have confirmed.
  job.channel->Change([](Script* script) { script->all_confirm = true; });
  SumOnce(&job, "next", 2);
  EXPECT_LE(job.Metric("kept_bytes"), 2 * kPage);
}

TEST(KeptSums, AReleasedTensorHasNone) {
  Job job(2, {}, kGoesOn);
  SumOnce(&job, "x", 8);
  SumOnce(&job, "y", 8);
  job.worker.Release({"x"}, 0);
  EXPECT_TRUE(job.Settles("kept_bytes", 8 * kPage));
}

// More sums than may be in flight at a time.
TEST(KeptSums, AllOfThemAreGivenAndHaveSerialsOfTheServerThatComes) {
  Job job(1, {}, kGoesOn);
  for (int i = 0; i < 20; ++i) SumOnce(&job, "once." + std::to_string(i), 8);
  job.channel->LoseServer(0);
  job.channel->ReplaceServer(0);
  SumOnce(&job, "next", 1);
  EXPECT_EQ(job.channel->gifts().size(), 160U);
  job.channel->Change([](Script* script) { script->all_confirm = true; });
  SumOnce(&job, "last", 1);
  EXPECT_EQ(job.Metric("kept_bytes"), kPage);
}

// If a worker wanted only a part of a sum, it cannot give the sum to others, and keeps nothing.
TEST(KeptSums, OnlyWholeSumsAreKept) {
  constexpr size_t kLength = 16 * kPage;
  Settings settings = kGoesOn;
  settings["BYTEPS_PARTITION_BYTES"] = std::to_string(kLength);
  Job job(1, {}, settings);
  auto values = Values(6 * kLength / sizeof(float), 1);
  PushPullRequest request = Job::RequestFor("x", &values);
  request.pull_begin = kLength;
  request.pull_end = 2 * kLength + 4;
  job.Wait(job.worker.PushPull(request));
  // The worker wanted a whole partition, four bytes of another one, and nothing of the others.
  EXPECT_EQ(job.Metric("kept_bytes"), kLength);
}

// A push tells the server up to which request the worker has the answers.
TEST(KeptSums, WhatIsOpenIsNotConfirmed) {
  Requests requests;
  requests.Track();
  std::vector<uint64_t> numbers;
  for (int i = 0; i < 4; ++i) {
    Request request;
    request.server = i % 2;
    numbers.push_back(requests.Remember(request));
  }
  Request taken;
  EXPECT_EQ(requests.FirstOpen(0), numbers[0]);
  EXPECT_TRUE(requests.Take(numbers[2], &taken));
  EXPECT_EQ(requests.FirstOpen(0), numbers[0]);
  EXPECT_TRUE(requests.HasOpen(0));
  EXPECT_TRUE(requests.Take(numbers[0], &taken));
  EXPECT_EQ(requests.FirstOpen(0), numbers[3] + 1);
  EXPECT_FALSE(requests.HasOpen(0));
  EXPECT_EQ(requests.FirstOpen(1), numbers[1]);
}

}  // namespace
}  // namespace core
}  // namespace byteps
