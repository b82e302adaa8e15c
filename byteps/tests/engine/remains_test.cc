// Failed, held and refused operations must leave nothing behind that affects later ones.
#include <gtest/gtest.h>
#include <malloc.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/engine/worker.h"
#include "byteps/recovery/worker/server_replacement.h"
#include "tests/support/kit.h"

namespace byteps {
namespace core {
namespace {

constexpr auto kLongPatience = std::chrono::seconds(120);
constexpr int kWorkers = 3;
constexpr int kPartitionBytes = 4096;
constexpr int kPartitionsOfSum = 3;
constexpr size_t kValuesOfSum = kPartitionsOfSum * kPartitionBytes / sizeof(float);
constexpr int kGoodSums = 3000;
// Bytes that this number of sums may add to the heap. An open round takes about 300 bytes, so
// leaking a round per sum would take more than twice as much.
constexpr size_t kHeapBytes = 1 << 20;

// Only one partition at a time may be in flight, so that a failing push delays the others.
Config TheConfig() {
  return ConfigWith({{"BYTEPS_PARTITION_BYTES", std::to_string(kPartitionBytes)},
                     {"BYTEPS_MIN_PARTITION_BYTES", std::to_string(kPartitionBytes)},
                     {"BYTEPS_SERVER_WINDOW_BYTES", std::to_string(kPartitionBytes)},
                     {"BYTEPS_SERVER_ENGINE_THREAD", "1"},
                     {"BYTEPS_PUSH_THREAD", "1"},
                     {"BYTEPS_PEER_TIMEOUT_S", "1"},
                     {"BYTEPS_OP_TIMEOUT_S", "600"}});
}

// Three workers and one server.
struct LoopedWorkers {
  LoopedWorkers() : config(TheConfig()), loop(config) {
    for (int rank = 0; rank < kWorkers; ++rank) {
      workers.push_back(std::make_unique<Worker>());
      workers.back()->Start(config, LaunchOf(rank, kWorkers), 1, loop.ChannelOf(rank),
                            MakeLossPolicy(config, 1));
      buffers.emplace_back(kValuesOfSum);
    }
  }
  ~LoopedWorkers() {
    for (auto& worker : workers) worker->Stop(false);
  }

  PushPullRequest RequestOf(int rank, const std::string& name = "x") {
    PushPullRequest request;
    request.tensor.name = name;
    request.tensor.bytes = kValuesOfSum * sizeof(float);
    request.tensor.average = false;
    request.input = request.output = buffers[rank].data();
    return request;
  }
  int64_t Start(int rank, int round) {
    for (size_t i = 0; i < kValuesOfSum; ++i) {
      buffers[rank][i] = static_cast<float>((i * 7 + rank * 3 + round) % 101);
    }
    return workers[rank]->PushPull(RequestOf(rank));
  }

  // The error that Wait throws, or "".
  std::string ErrorOf(int rank, int64_t handle) {
    try {
      return workers[rank]->WaitFor(handle, nullptr, kLongPatience) ? "" : "no answer";
    } catch (const Error& e) {
      // The transport may still send a failed operation's values, so the next one has another
      // buffer.
      failed.push_back(std::exchange(buffers[rank], std::vector<float>(kValuesOfSum)));
      return e.what();
    }
  }

  // A sum over all ranks. Checks a few elements.
  void Sum(int round) {
    int64_t handles[kWorkers];
    for (int rank = 0; rank < kWorkers; ++rank) handles[rank] = Start(rank, round);
    for (int rank = 0; rank < kWorkers; ++rank) {
      ASSERT_EQ(ErrorOf(rank, handles[rank]), "") << "rank " << rank << ", round " << round;
      for (size_t i = rank; i < kValuesOfSum; i += 509) {
        float sum = 0;
        for (int other = 0; other < kWorkers; ++other) {
          sum += static_cast<float>((i * 7 + other * 3 + round) % 101);
        }
        ASSERT_EQ(buffers[rank][i], sum) << "rank " << rank << ", round " << round;
      }
    }
  }

  // Sums many times. Then no round is open, and the heap is as large as after the first sums.
  void SumManyTimes() {
    constexpr int kFirst = kGoodSums / 10;
    for (int round = 0; round < kFirst; ++round) {
      Sum(round);
      if (testing::Test::HasFatalFailure()) return;
    }
    const size_t before = mallinfo2().uordblks;
    for (int round = kFirst; round < kGoodSums; ++round) {
      Sum(round);
      if (testing::Test::HasFatalFailure()) return;
    }
    // The server closes a round after it has sent the last answer.
    const auto end = std::chrono::steady_clock::now() + kLongPatience;
    while (loop.server().OpenRounds() > 0 && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(loop.server().OpenRounds(), 0);
    EXPECT_LT(mallinfo2().uordblks, before + kHeapBytes);
  }

  std::vector<std::vector<float>> buffers, failed;  // outlive the workers, which may read them
  const Config config;
  LoopJob loop;
  std::vector<std::unique_ptr<Worker>> workers;
};

// An operation fails at one worker before all its partitions were pushed. All workers must continue
// at once, not after BYTEPS_OP_TIMEOUT_S.
TEST(Remains, NothingOfAnOperationThatFailedBeforeItWasPushed) {
  LoopedWorkers job;
  job.Sum(0);
  for (const int rank : {1, 2}) {
    job.loop.FailNextPush(rank, "this worker has no memory");
    int64_t handles[kWorkers];
    for (int one = 0; one < kWorkers; ++one) handles[one] = job.Start(one, 1);
    EXPECT_EQ(job.ErrorOf(rank, handles[rank]), "this worker has no memory");
    EXPECT_TRUE(job.loop.failed());
    // The failed worker's next push tells the other workers.
    const int64_t next = job.Start(rank, 2);
    for (int one = 0; one < kWorkers; ++one) {
      if (one == rank) continue;
      const std::string error = job.ErrorOf(one, handles[one]);
      EXPECT_NE(error.find("worker " + std::to_string(rank) + " gave up round"), std::string::npos)
          << error;
      handles[one] = job.Start(one, 2);
    }
    handles[rank] = next;
    for (int one = 0; one < kWorkers; ++one) EXPECT_EQ(job.ErrorOf(one, handles[one]), "");
  }
  job.SumManyTimes();
}

// All operations fail before any push, so no round is ever opened.
TEST(Remains, NothingOfAnOperationThatNobodyPushed) {
  LoopedWorkers job;
  job.Sum(0);
  for (int rank = 0; rank < kWorkers; ++rank) {
    job.loop.FailNextPush(rank, "this worker has no memory");
    EXPECT_EQ(job.ErrorOf(rank, job.Start(rank, 1)), "this worker has no memory");
  }
  job.SumManyTimes();
}

// A worker is late. Its pushes of the old round are refused; its later pushes are summed.
TEST(Remains, NothingOfAnOperationThatWasLate) {
  LoopedWorkers job;
  job.loop.SetTimeout(300);
  int64_t handles[kWorkers];
  for (const int rank : {0, 2}) handles[rank] = job.Start(rank, 0);
  for (const int rank : {0, 2}) {
    const std::string error = job.ErrorOf(rank, handles[rank]);
    EXPECT_NE(error.find("lacks the push of worker 1"), std::string::npos) << error;
  }
  const std::string error = job.ErrorOf(1, job.Start(1, 0));
  EXPECT_NE(error.find("lacks the push of worker 1"), std::string::npos) << error;
  // Pushes of other partitions may still be in flight.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (job.loop.server().OpenRounds() > 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(job.loop.server().OpenRounds(), 0);
  job.loop.SetTimeout(0);
  job.SumManyTimes();
}

// One of three workers declares a tensor differently. That tensor is refused, others are not.
TEST(Remains, NothingOfADeclarationThatWasRefused) {
  LoopedWorkers job;
  PushPullRequest wrong = job.RequestOf(0, "y");
  wrong.tensor.bytes /= 2;
  const int64_t waits = job.workers[0]->PushPull(wrong);
  for (const int rank : {1, 2}) {
    try {
      job.ErrorOf(rank, job.workers[rank]->PushPull(job.RequestOf(rank, "y")));
      ADD_FAILURE() << "it was not refused";
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("workers disagree on a tensor"), std::string::npos);
    }
  }
  EXPECT_NE(job.ErrorOf(0, waits), "");
  job.SumManyTimes();
}

// Pushes that are held back end with their worker.
TEST(Remains, NothingOfWhatWasHeldBack) {
  LoopedWorkers job;
  float value = 0;
  PushPullRequest request = job.RequestOf(0, "shared");
  request.tensor.bytes = sizeof(float);
  request.input = request.output = &value;
  for (int round = 0; round < 2500; ++round) job.workers[0]->PushPull(request);
  std::weak_ptr<Tensor> tensor;
  {
    TensorPtr known;
    const int64_t last = job.workers[0]->PushPull(request, &known);
    tensor = known;
    EXPECT_FALSE(job.workers[0]->Poll(last));
  }
  job.workers[0]->Stop(false);
  EXPECT_TRUE(tensor.expired());
}

}  // namespace
}  // namespace core
}  // namespace byteps
