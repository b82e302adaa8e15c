// Streamed sums on a simulated GPU. Streams wait for the sums, and threads do not.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/device/fake.h"
#include "tests/support/job.h"

namespace byteps {
namespace core {
namespace {

const Settings kRoom = {{"BYTEPS_STREAMED_BYTES", std::to_string(256 << 20)}};

PushPullRequest Streamed(const std::string& name, std::vector<float>* values, DeviceStream stream) {
  PushPullRequest request = Job::RequestFor(name, values, 0, stream);
  request.streamed = true;
  return request;
}

// Whether a stream becomes idle while other threads work.
bool BecomesIdle(DeviceStream stream) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!StreamIsIdle(stream)) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

class StreamedSums : public testing::Test {
 protected:
  StreamedSums() {
    fake::SetCurrentDevice(0);
    stream_ = MakeStream();
  }

  DeviceStream stream_;
};

TEST_F(StreamedSums, TheHostWaitsForNothing) {
  for (const size_t count : {1, 1024, 5000, 6 << 20}) {  // the last size takes several chunks
    SCOPED_TRACE(count);
    Script script;
    script.shuffled = true;
    Settings settings = kRoom;
    settings.insert({"BYTEPS_PARTITION_BYTES", count > 5000 ? "1048576" : "4096"});
    Job job(2, script, settings);
    auto values = Values(count, 1);
    const auto sum = Times(values, 3);
    const auto hold = fake::Hold(stream_);  // the values are not ready either
    for (int round = 0; round < 2; ++round) {
      SCOPED_TRACE(round);
      auto& tensor = values;
      job.Wait(job.worker.PushPull(Streamed("x", &tensor, stream_)), stream_);
    }
    hold->set_value();
    fake::Synchronize(stream_);
    EXPECT_EQ(values, Times(sum, 3)) << count;
  }
}

TEST_F(StreamedSums, NeighboursAreCopiedByOneCall) {
  Job job(2, {}, kRoom);  // hundreds of partitions
  const std::vector<std::pair<size_t, uint64_t>> chunks = {
      {4 << 20, 1}, {6 << 20, 2}, {8 << 20, 2}, {16 << 20, 3}, {24 << 20, 3}};
  for (const auto& [count, expected] : chunks) {
    auto values = Values(count, 1);
    const auto sum = Times(values, 3);
    const uint64_t before = fake::CountCopies();
    const std::string name = "x" + std::to_string(count);
    job.Wait(job.worker.PushPull(Streamed(name, &values, stream_)), stream_);
    fake::Synchronize(stream_);
    EXPECT_EQ(fake::CountCopies() - before, 2 * expected) << count;
    EXPECT_TRUE(values == sum) << count;
  }
}

TEST_F(StreamedSums, NoCopyIsOfTwoBlocks) {
  Job job(2, {}, {{"BYTEPS_STREAMED_BYTES", std::to_string(32 << 20)}});
  for (const size_t count : {1 << 20, 2 << 20, 6 << 20}) {  // each size pins more memory
    SCOPED_TRACE(count);
    auto values = Values(count, 1);
    const auto sum = Times(values, 3);
    job.Wait(job.worker.PushPull(Streamed("x" + std::to_string(count), &values, stream_)), stream_);
    fake::Synchronize(stream_);
    EXPECT_EQ(values, sum);
  }
}

TEST_F(StreamedSums, AreDoneWhileTheDriverHoldsUpEveryThread) {
  Job job(2, {}, kRoom);
  auto values = Values(20000, 1);
  const auto sum = Times(values, 3);
  job.channel->HoldServer(0, false);
  job.channel->HoldServer(1, false);
  const int64_t handle = job.worker.PushPull(Streamed("x", &values, stream_));
  job.Wait(handle, stream_);
  const auto calls = fake::HoldCalls();  // has the effect of a kernel that is being loaded
  job.channel->Release();
  EXPECT_TRUE(BecomesIdle(stream_));
  calls->set_value();
  EXPECT_EQ(values, sum);
}

TEST_F(StreamedSums, AWantedPart) {
  Job job(2, {}, kRoom);
  auto values = Values(8 * kPage / sizeof(float), 1);
  const auto before = values;
  auto request = Streamed("x", &values, stream_);
  request.pull_begin = kPage + 400;
  request.pull_end = 3 * kPage;
  job.Wait(job.worker.PushPull(request), stream_);
  fake::Synchronize(stream_);
  for (size_t i = 0; i < values.size(); ++i) {
    const bool wanted = i >= (kPage + 400) / sizeof(float) && i < 3 * kPage / sizeof(float);
    ASSERT_EQ(values[i], before[i] * (wanted ? 3 : 1)) << i;
  }
}

TEST_F(StreamedSums, WithTooLittlePinnedMemoryAreAwaited) {
  // Tests of broken devices never return their memory; another partition size uses another pool.
  Job job(2, {}, {{"BYTEPS_STREAMED_BYTES", "1"}, {"BYTEPS_PARTITION_BYTES", "16384"}});
  std::vector<std::vector<float>> tensors;
  std::vector<int64_t> handles;
  for (int i = 0; i < 8; ++i) tensors.push_back(Values(9000, i));
  const auto before = tensors;
  for (int i = 0; i < 8; ++i) {
    handles.push_back(job.worker.PushPull(Streamed("t" + std::to_string(i), &tensors[i], stream_)));
  }
  for (const int64_t handle : handles) job.Wait(handle, stream_);
  fake::Synchronize(stream_);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(tensors[i], Times(before[i], 3)) << i;
}

TEST_F(StreamedSums, ThatFailLetTheStreamGoOnWithNoNumbers) {
  Job job(2, {}, kRoom);
  auto values = Values(20000, 1);
  job.channel->HoldServer(0, false);
  const int64_t handle = job.worker.PushPull(Streamed("x", &values, stream_));
  job.Wait(handle, stream_);
  const auto calls = fake::HoldCalls();
  job.channel->FailJob("worker 1 was lost");
  EXPECT_TRUE(BecomesIdle(stream_));
  calls->set_value();
  EXPECT_TRUE(std::isnan(values.front()) || std::isnan(values.back()));
  try {
    job.worker.PushPull(Streamed("y", &values, stream_));
    ADD_FAILURE() << "the next sum was begun";
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()), "worker 1 was lost");
  }
}

TEST_F(StreamedSums, ThatFailBeforeTheirValuesAreThereGiveNoNumbersToo) {
  Job job(2, {}, kRoom);
  auto values = Values(20000, 1);
  const auto hold = fake::Hold(stream_);
  const int64_t handle = job.worker.PushPull(Streamed("x", &values, stream_));
  job.Wait(handle, stream_);
  job.channel->FailJob("worker 1 was lost");
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(std::isnan(values.front()));
  hold->set_value();
  EXPECT_TRUE(BecomesIdle(stream_));
  for (const float value : values) ASSERT_TRUE(std::isnan(value));
}

// All sums fail while the transport still holds their values. They share one wait for the
// transport.
TEST_F(StreamedSums, ThatFailTogetherLetTheirStreamsGoOnTogether) {
  constexpr int kSums = 30;  // would take half a minute if the test waited for one after another
  Job job(1, {}, kRoom);
  job.channel->HoldServer(0, true);
  std::vector<std::vector<float>> tensors(kSums, Values(3000, 1));
  for (int i = 0; i < kSums; ++i) {
    job.Wait(job.worker.PushPull(Streamed("t" + std::to_string(i), &tensors[i], stream_)), stream_);
  }
  const auto began = std::chrono::steady_clock::now();
  job.channel->FailJob("worker 1 was lost");
  EXPECT_TRUE(BecomesIdle(stream_));
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(kSums / 2));
  for (const auto& values : tensors) EXPECT_TRUE(std::isnan(values.front()));
  job.channel->Release();
}

TEST_F(StreamedSums, ThatOneServerRefusesFailTheJob) {
  Job job(1, {}, {{"BYTEPS_OP_TIMEOUT_S", "1"}, {"BYTEPS_STREAMED_BYTES", "268435456"}});
  auto values = Values(3000, 1);
  job.channel->HoldServer(0, false);
  job.Wait(job.worker.PushPull(Streamed("x", &values, stream_)), stream_);
  EXPECT_TRUE(BecomesIdle(stream_));
  EXPECT_TRUE(std::isnan(values.front()));
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!job.worker.failed() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(job.worker.failed());
}

TEST_F(StreamedSums, ThatFailedAreRefusedBeforeAnyoneWaits) {
  auto values = Values(3000, 1);
  {
    Job job(1, {}, kRoom);
    job.channel->HoldServer(0, false);
    const int64_t handle = job.worker.PushPull(Streamed("x", &values, stream_));
    job.channel->FailJob("worker 1 was lost");
    EXPECT_EQ(job.ErrorOf(handle, stream_), "worker 1 was lost");
  }
  // The next job's copies are queued behind the failed sum's copies, which read `values`.
  Job next(1, {}, kRoom);
  auto others = Values(3000, 2);
  const auto sum = Times(others, 3);
  next.Wait(next.worker.PushPull(Streamed("x", &others, stream_)), stream_);
  EXPECT_TRUE(BecomesIdle(stream_));
  EXPECT_EQ(others, sum);
}

}  // namespace
}  // namespace core
}  // namespace byteps
