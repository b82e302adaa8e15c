// Failures in a worker: of its peers, its job, a server, or an operation.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

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

// After a failed Wait the caller may free the memory.
TEST(Failure, NothingIsWrittenAfterwards) {
  for (const bool in_place : {true, false}) {
    Script script;
    script.in_place = in_place;
    script.chunk = 64;
    script.chunk_us = 200;
    // There is one partition, so the part that is awaited below is the only one that reads the
    // tensor.
    Job job(1, script,
            {{"BYTEPS_PARTITION_BYTES", "1048576"}, {"BYTEPS_MIN_PARTITION_BYTES", "1048576"}});
    auto values = Values(100'000, 1);  // takes 1.25 s to receive in place
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
  auto values = Values(100, 1);  // outlives the worker, which may still send it
  Job job(2, {}, {{"BYTEPS_OP_TIMEOUT_S", "0.1"}});
  job.worker.Declare({Job::RequestFor("x", &values).tensor});
  job.channel->HoldServer(0, false);
  const std::string error = job.ErrorOf(job.Start("x", &values));
  EXPECT_TRUE(Has(error, "'x' timed out: no answer from server 0")) << error;
}

TEST(Failure, OfWhatWaitsBehindOthersNamesTheirServer) {
  // These values outlive the worker, which may still send them. Each has one partition, on server
  // 0.
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
    // The values outlive the worker, which may still send them after their operations have failed.
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

TEST(Failure, OfAServerEndsTheJob) {
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

}  // namespace
}  // namespace core
}  // namespace byteps
