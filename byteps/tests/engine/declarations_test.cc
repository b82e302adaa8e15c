// What a worker declares to servers that a script plays.
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "tests/support/job.h"

namespace byteps {
namespace core {
namespace {

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
