// A worker over servers that a script plays, with a GPU that a thread plays.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "byteps/base/error.h"
#include "byteps/device/fake.h"
#include "byteps/engine/worker.h"
#include "fake_channel.h"
#include "settings.h"

namespace byteps {
namespace core {
namespace {

constexpr auto kPatience = std::chrono::seconds(60);
constexpr int kPage = 4096;

// One worker of a job of three.
struct Job {
  explicit Job(int servers, Script script = {}, Settings settings = {}) {
    settings.insert({"BYTEPS_PARTITION_BYTES", std::to_string(kPage)});
    settings.insert({"BYTEPS_PINNED_BYTES", std::to_string(16 * kPage)});
    auto made = std::make_unique<FakeChannel>(std::move(script));
    channel = made.get();
    worker.Start(ConfigWith(settings), LaunchOf(0, 3), servers, std::move(made));
  }
  ~Job() {
    if (worker.started()) channel->Release();
    worker.Stop(false);
  }

  int64_t Start(const std::string& name, std::vector<float>* values, int device = kCpu,
                DeviceStream stream = nullptr, int priority = 0) {
    return worker.PushPull(RequestFor(name, values, device, stream, priority));
  }

  static PushPullRequest RequestFor(const std::string& name, std::vector<float>* values,
                                    int device = kCpu, DeviceStream stream = nullptr,
                                    int priority = 0) {
    PushPullRequest request;
    request.tensor.name = name;
    request.tensor.bytes = values->size() * sizeof(float);
    request.tensor.device = device;
    request.tensor.placement = 0;
    request.input = request.output = values->data();
    request.priority = priority;
    request.stream = stream;
    return request;
  }

  void Wait(int64_t handle, DeviceStream stream = nullptr) {
    ASSERT_TRUE(worker.WaitFor(handle, stream, kPatience)) << "no answer";
  }

  // What Wait throws.
  std::string ErrorOf(int64_t handle, DeviceStream stream = nullptr) {
    try {
      return worker.WaitFor(handle, stream, kPatience) ? "it was well" : "no answer";
    } catch (const Error& e) {
      return e.what();
    }
  }

  double Metric(const std::string& name) {
    for (const auto& metric : worker.Metrics()) {
      if (metric.name == "byteps_worker_" + name) return metric.value;
    }
    ADD_FAILURE() << "there is no " << name;
    return 0;
  }

  // Whether the metric comes to have this value.  A partition leaves the transport when the push
  // loop lets go of its message, perhaps after the answer has come.
  bool Settles(const std::string& name, double value) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (Metric(name) != value) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  Worker worker;
  FakeChannel* channel;
};

std::vector<float> Values(size_t count, int salt) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>((i * 7 + salt * 13) % 1009);
  return values;
}

std::vector<float> Times(std::vector<float> values, float ranks) {
  for (float& value : values) value *= ranks;
  return values;
}

// Whether `stream` does nothing more before `hold`, which this gives up, lets copies go on.
bool WaitsForCopies(DeviceStream stream, std::promise<void>* hold) {
  std::atomic<bool> released{false};
  std::atomic<bool> waited{false};
  CallWhenDone(stream, [&] { waited = released.load(); });
  released = true;
  hold->set_value();
  fake::Synchronize(stream);
  return waited;
}

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// ------------------------------------------------------------------- sums

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

// ----------------------------------------------------------- declarations

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

// ---------------------------------------------------------------- failure

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

TEST(Failure, OfAConnectionThatNobodyExplains) {
  Job job(1);
  auto values = Values(100, 1);
  job.Wait(job.Start("x", &values));
  job.channel->Close();
  const std::string error = job.ErrorOf(job.Start("x", &values));
  EXPECT_TRUE(Has(error, "could not be sent to server 0")) << error;
}

TEST(Failure, LateAnswersNameTheServer) {
  Job job(2, {}, {{"BYTEPS_OP_TIMEOUT_S", "0.1"}});
  auto values = Values(100, 1);
  job.worker.Declare({Job::RequestFor("x", &values).tensor});
  job.channel->HoldServer(0, false);
  const std::string error = job.ErrorOf(job.Start("x", &values));
  EXPECT_TRUE(Has(error, "'x' timed out: no answer from server 0")) << error;
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

// -------------------------------------------------------------------- GPU

TEST(Gpu, ManySumsThroughLittlePinnedMemory) {
  const uint64_t pinned_before = fake::PinnedBytes();
  for (const bool in_place : {true, false}) {
    // Copies of the second kind of partition are not awaited.
    for (const auto& [pinned, partition] :
         {std::pair("1", "8192"), std::pair("65536", "8192"), std::pair("1", "131072")}) {
      Script script;
      script.in_place = in_place;
      script.shuffled = true;
      Job job(3, script, {{"BYTEPS_PINNED_BYTES", pinned}, {"BYTEPS_PARTITION_BYTES", partition}});
      fake::SetCurrentDevice(0);
      const DeviceStream stream = MakeStream();
      std::vector<std::vector<float>> tensors;
      for (int i = 0; i < 20; ++i) tensors.push_back(Values(1 + 1700 * i, i));
      const auto before = tensors;
      std::vector<int64_t> handles;
      for (int i = 0; i < 20; ++i) {
        handles.push_back(job.Start("t" + std::to_string(i), &tensors[i], 0, stream, i % 3));
      }
      for (const int64_t handle : handles) job.Wait(handle, stream);
      fake::Synchronize(stream);  // the host did not wait for the copies, the stream did
      for (int i = 0; i < 20; ++i) EXPECT_EQ(tensors[i], Times(before[i], 3)) << i;
    }
  }
  EXPECT_LE(fake::PinnedBytes() - pinned_before, 65536u + 131072u);
}

TEST(Gpu, RoundsOfOneNameInFlight) {
  Job job(2);
  fake::SetCurrentDevice(0);
  std::vector<std::vector<float>> rounds;
  for (int i = 0; i < 4; ++i) rounds.push_back(Values(6000, i));
  const auto before = rounds;
  std::vector<int64_t> handles;
  for (auto& values : rounds) handles.push_back(job.Start("x", &values, 0));
  for (const int64_t handle : handles) job.Wait(handle);
  fake::Synchronize(nullptr);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(rounds[i], Times(before[i], 3)) << i;
}

// A gradient that is still computed holds neither a window nor the stream of copies.
TEST(Gpu, WhatIsNotReadyHoldsUpNobody) {
  Job job(1, {}, {{"BYTEPS_SERVER_WINDOW_BYTES", "1"}});
  fake::SetCurrentDevice(0);
  const DeviceStream busy = MakeStream(), idle = MakeStream();
  auto late = Values(5000, 1), early = Values(5000, 2);
  const auto late_sum = Times(late, 3), early_sum = Times(early, 3);
  const auto hold = fake::Hold(busy);
  const int64_t waiting = job.Start("late", &late, 0, busy, 9);
  job.Wait(job.Start("early", &early, 0, idle), idle);
  fake::Synchronize(idle);
  EXPECT_EQ(early, early_sum);
  EXPECT_FALSE(job.worker.Poll(waiting));
  hold->set_value();
  job.Wait(waiting, busy);
  fake::Synchronize(busy);
  EXPECT_EQ(late, late_sum);
}

TEST(Gpu, StreamsWaitForCopiesAndTheHostDoesNot) {
  Job job(1);
  fake::SetCurrentDevice(0);
  const DeviceStream stream = MakeStream();
  auto values = Values(1000, 1);
  const auto sum = Times(values, 3);
  const auto hold = fake::HoldCopiesToDevice();
  job.Wait(job.Start("x", &values, 0, stream), stream);  // returns, though nothing is copied yet
  EXPECT_TRUE(WaitsForCopies(stream, hold.get()));
  EXPECT_EQ(values, sum);
}

// The last answer may be that of a partition of which nothing is wanted.
TEST(Gpu, StreamsWaitForCopiesOfAWantedPart) {
  Job job(2);
  fake::SetCurrentDevice(0);
  const DeviceStream stream = MakeStream();
  auto values = Values(8 * kPage / sizeof(float), 1);
  auto request = Job::RequestFor("x", &values, 0, stream);
  job.Wait(job.worker.PushPull(request), stream);
  fake::Synchronize(stream);
  const auto pushes = job.channel->pushes();
  const auto first = std::min_element(pushes.begin(), pushes.end());
  const int other = 1 - first->second;
  const auto at_other = std::count_if(pushes.begin(), pushes.end(),
                                      [&](const auto& push) { return push.second == other; });
  ASSERT_GT(at_other, 0);

  request.pull_end = kPage;
  const auto before = values;
  job.channel->HoldServer(other, false);
  const auto hold = fake::HoldCopiesToDevice();
  const int64_t handle = job.worker.PushPull(request);
  ASSERT_TRUE(job.channel->AwaitHeld(at_other));
  ASSERT_TRUE(job.Settles("pulled_partitions_total", 2.0 * pushes.size() - at_other));
  job.channel->Release();
  job.Wait(handle, stream);
  EXPECT_TRUE(WaitsForCopies(stream, hold.get()));
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(values[i], before[i] * (i < kPage / sizeof(float) ? 3 : 1)) << i;
  }
}

TEST(Gpu, TwoDevicesAndTheCallersDevice) {
  Job job(2);
  fake::SetCurrentDevice(0);
  const DeviceStream first = MakeStream();
  fake::SetCurrentDevice(1);
  const DeviceStream second = MakeStream();
  auto a = Values(3000, 1), b = Values(3000, 2);
  const auto a_sum = Times(a, 3), b_sum = Times(b, 3);
  const int64_t of_a = job.Start("a", &a, 0, first), of_b = job.Start("b", &b, 1, second);
  EXPECT_EQ(fake::CurrentDeviceNumber(), 1);
  job.Wait(of_a, first);
  job.Wait(of_b, second);
  EXPECT_EQ(fake::CurrentDeviceNumber(), 1);
  fake::Synchronize(second);
  fake::SetCurrentDevice(0);
  fake::Synchronize(first);
  EXPECT_EQ(a, a_sum);
  EXPECT_EQ(b, b_sum);
}

// As when a peer is lost while an NCCL kernel waits for it: the GPU's work never ends.
TEST(Gpu, FailureWhileTheGpuHangs) {
  fake::SetCurrentDevice(0);
  const DeviceStream stuck = MakeStream();
  const auto hold = fake::Hold(stuck);
  auto values = Values(3000, 1);
  {
    Job job(2);
    const int64_t handle = job.Start("x", &values, 0, stuck);
    job.channel->FailJob("worker 1 was lost");
    EXPECT_EQ(job.ErrorOf(handle, stuck), "worker 1 was lost");
  }  // Stop returns
  hold->set_value();
  fake::Synchronize(stuck);
}

TEST(Gpu, BrokenDeviceFailsWhatIsUnderWay) {
  fake::SetCurrentDevice(0);
  for (const size_t elements : {3000, 100000}) {
    const DeviceStream stream = MakeStream();
    const auto hold = fake::Hold(stream);
    auto values = Values(elements, 1);
    Job job(1);
    const int64_t handle = job.Start("x", &values, 0, stream);
    fake::SetBroken(true);
    hold->set_value();
    const std::string error = job.ErrorOf(handle, stream);
    fake::SetBroken(false);
    EXPECT_TRUE(Has(error, "broken")) << error;
  }
}

// The device fails while a copy is given to it.
TEST(Gpu, BrokenDeviceFailsCopies) {
  fake::SetCurrentDevice(0);
  // Copies that were given to it before it broke are waited for by nobody.  They may still be made.
  static auto& kept = *new std::deque<std::vector<float>>;
  for (const size_t elements : {3000, 100000}) {
    Job job(1);
    auto& values = kept.emplace_back(Values(elements, 1));
    auto request = Job::RequestFor("x", &values, 0, nullptr);
    job.Wait(job.worker.PushPull(request));  // declares it
    fake::Synchronize(nullptr);
    job.channel->HoldServer(0, false);
    const int64_t handle = job.worker.PushPull(request);
    ASSERT_TRUE(job.channel->AwaitHeld(1));
    fake::SetBroken(true);
    job.channel->Release();
    const std::string error = job.ErrorOf(handle);
    fake::SetBroken(false);
    EXPECT_TRUE(Has(error, "broken")) << error;
  }
}

}  // namespace
}  // namespace core
}  // namespace byteps
