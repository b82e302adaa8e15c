// Sums of tensors on a simulated GPU, over scripted servers. Threads wait for the sums.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <future>
#include <string>
#include <vector>

#include "byteps/device/fake.h"
#include "tests/support/job.h"

namespace byteps {
namespace core {
namespace {

// Returns whether later work of `stream` waits until `hold` is released, as after the copies.
bool WaitsForCopies(DeviceStream stream, std::promise<void>* hold) {
  std::atomic<bool> released{false};
  std::atomic<bool> waited{false};
  CallWhenDone(stream, [&] { waited = released.load(); });
  released = true;
  hold->set_value();
  fake::Synchronize(stream);
  return waited;
}

// Pins all the memory that small sums may take.
void PinForSmallSums() {
  constexpr uint64_t kMost = 4 << 20;
  PinnedPool::Shared(PinnedPool::Use::kSmallSums, kMost, 1 << 20)->Reserve(kMost);
}

TEST(Gpu, ManySumsThroughLittlePinnedMemory) {
  PinForSmallSums();
  const uint64_t pinned_before = fake::PinnedBytes();
  for (const bool in_place : {true, false}) {
    // Partitions of the second size are too large for waiting for their copies.
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
      fake::Synchronize(stream);  // the stream waited for the copies, not the host
      for (int i = 0; i < 20; ++i) EXPECT_EQ(tensors[i], Times(before[i], 3)) << i;
    }
  }
  EXPECT_LE(fake::PinnedBytes() - pinned_before, 65536u + 131072u);
}

TEST(Gpu, PinnedMemoryIsWhatAllTensorsWant) {
  PinForSmallSums();
  const uint64_t before = fake::PinnedBytes();
  Job job(2, {}, {{"BYTEPS_PINNED_BYTES", "1048576"}, {"BYTEPS_PARTITION_BYTES", "32768"}});
  fake::SetCurrentDevice(0);
  for (int i = 1; i <= 3; ++i) {
    auto values = Values(16384, i);
    const auto sum = Times(values, 3);
    job.Wait(job.Start("t" + std::to_string(i), &values, 0));
    fake::Synchronize(nullptr);
    EXPECT_EQ(values, sum);
    EXPECT_EQ(fake::PinnedBytes() - before, i * 65536u);
  }
}

// A gradient that is still being computed occupies neither a window nor the copy stream.
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
  // This call returns, although nothing is copied yet.
  job.Wait(job.Start("x", &values, 0, stream), stream);
  EXPECT_TRUE(WaitsForCopies(stream, hold.get()));
  EXPECT_EQ(values, sum);
}

// The last answer may belong to an unwanted partition.
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

// An NCCL kernel may wait for a lost peer: then the GPU's work never ends.
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

// The device fails while copies are being enqueued.
TEST(Gpu, BrokenDeviceFailsCopies) {
  fake::SetCurrentDevice(0);
  // No thread waits for copies enqueued before the device broke, so they may still happen.
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

// ----- small sums that are alone in flight

class SmallSums : public testing::Test {
 protected:
  SmallSums() : stream_((fake::SetCurrentDevice(0), MakeStream())) {}

  // Sums the values, and counts the copies in both directions.
  uint64_t CopiesOf(const std::string& name, std::vector<float>* values) {
    const uint64_t before = fake::CountCopies();
    Await(job_.Start(name, values, 0, stream_), stream_);
    return fake::CountCopies() - before;
  }

  void Await(int64_t handle, DeviceStream stream) {
    job_.Wait(handle, stream);
    fake::Synchronize(stream);
  }

  // Tests of broken devices never return their memory; another partition size uses another pool.
  Job job_{2, {}, {{"BYTEPS_PARTITION_BYTES", "8192"}}};
  DeviceStream stream_;
};

TEST_F(SmallSums, AreCopiedAsAWhole) {
  for (const size_t count : {1, 8192, 1 << 18}) {
    SCOPED_TRACE(count);
    auto values = Values(count, 1);
    const auto sum = Times(values, 3);
    EXPECT_EQ(CopiesOf("x" + std::to_string(count), &values), 2u);
    EXPECT_EQ(values, sum);
  }
  auto larger = Values((1 << 18) + 1024, 1);
  EXPECT_GT(CopiesOf("larger", &larger), 100u);
}

TEST_F(SmallSums, AreCopiedInPartitionsWhileOthersAreInFlight) {
  const DeviceStream busy = MakeStream();
  auto other = Values(1000, 1), values = Values(8192, 2);
  const auto other_sum = Times(other, 3), sum = Times(values, 3);
  const auto hold = fake::Hold(busy);
  const int64_t late = job_.Start("other", &other, 0, busy);
  EXPECT_EQ(CopiesOf("x", &values), 8u);
  EXPECT_EQ(values, sum);
  hold->set_value();
  Await(late, busy);
  EXPECT_EQ(other, other_sum);
}

TEST_F(SmallSums, WhoseCopyTakesLongerHoldUpNoCaller) {
  auto values = Values(5000, 1);
  const auto sum = Times(values, 3);
  const auto hold = fake::HoldCopiesToHost();
  const int64_t handle = job_.Start("x", &values, 0, stream_);  // returns
  EXPECT_TRUE(job_.channel->pushes().empty());
  hold->set_value();
  Await(handle, stream_);
  EXPECT_EQ(values, sum);
}

TEST_F(SmallSums, ThatFailLeaveTheirTensors) {
  auto values = Values(5000, 1);
  const auto before = values;
  job_.channel->HoldServer(0, false);
  const int64_t handle = job_.Start("x", &values, 0, stream_);
  job_.channel->FailJob("worker 1 was lost");
  EXPECT_EQ(job_.ErrorOf(handle, stream_), "worker 1 was lost");
  fake::Synchronize(stream_);
  EXPECT_EQ(values, before);
}

}  // namespace
}  // namespace core
}  // namespace byteps
