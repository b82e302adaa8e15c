// Plan: how tensors are cut and dealt. PushScheduler: which partition goes next.
#include "byteps/engine/push_scheduler.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/mutex.h"
#include "byteps/base/protocol.h"
#include "byteps/engine/delivery_rate.h"
#include "tests/support/kit.h"

namespace byteps {
namespace core {
namespace {

Plan PlanOf(int rank, int workers, int servers, const Settings& settings = {}) {
  return Plan(ConfigWith(settings), LaunchOf(rank, workers), servers);
}

TensorSpec SpecOf(const std::string& name, uint64_t bytes) {
  TensorSpec spec;
  spec.name = name;
  spec.bytes = bytes;
  spec.placement = 0;
  return spec;
}

TEST(Plan, NoMorePartitionsThanKeysWithManyServers) {
  const Plan plan = PlanOf(0, 1, 3000);
  const Declaration d = plan.Declare(SpecOf("large", 100'000'000'000));
  EXPECT_LE(d.NumPartitions(), kMaxPartitions);
  EXPECT_GT(d.NumPartitions(), kMaxPartitions / 2);
}

TEST(Plan, PiecesHavePartitionsAsLongAsTheWholeTensors) {
  const Plan plan = PlanOf(0, 1, 4);
  const Declaration whole = plan.Declare(SpecOf("whole", 128 << 20));
  EXPECT_EQ(whole.partition_bytes, 512u << 10);
  TensorSpec spec = SpecOf("piece", 16 << 20);
  spec.piece_of = whole.bytes;
  EXPECT_EQ(plan.Declare(spec).partition_bytes, whole.partition_bytes);
  EXPECT_EQ(plan.Declare(spec).NumPartitions(), whole.NumPartitions() / 8);
  // A small piece may fit into one partition.
  spec.bytes = 4096;
  EXPECT_EQ(plan.Declare(spec).NumPartitions(), 1u);
  EXPECT_EQ(plan.BytesPerServer(spec), (std::vector<uint64_t>{4096, 0, 0, 0}));
}

TEST(Plan, PartitionsAreLongerOnAFastLink) {
  Plan plan = PlanOf(0, 1, 2);
  EXPECT_EQ(plan.PartitionBytes(DType::kFloat32, 16 << 20), 128u << 10);
  plan.SetLink(10);
  EXPECT_EQ(plan.PartitionBytes(DType::kFloat32, 16 << 20), 36u * 4096)
      << "8 MiB a server, 2,500 bytes in 2 us";
  plan.SetLink(100);
  EXPECT_EQ(plan.PartitionBytes(DType::kFloat32, 16 << 20), 112u * 4096);
  EXPECT_EQ(plan.PartitionBytes(DType::kFloat32, 4096), 128u << 10)
      << "short tensors have short ones";
  EXPECT_EQ(plan.PartitionBytes(DType::kFloat32, 256 << 20), 2u << 20) << "64 a server are longer";
  EXPECT_EQ(PlanOf(0, 1, 2, {{"BYTEPS_PARTITION_BYTES", "4096"}})
                .PartitionBytes(DType::kFloat32, 16 << 20),
            4096u);
}

TEST(Plan, PartitionsOfBlocksHaveWholeBlocksAndWholePages) {
  constexpr uint64_t kValues = 64 << 20;
  for (const DType type : {DType::kInt8x128, DType::kInt4x128}) {
    const uint64_t bytes = kValues / kBlockValues * SizeOf(type);
    for (const uint64_t size : {SizeOf(type), bytes / 100, bytes, 16 * bytes}) {
      const uint32_t partition = PlanOf(0, 1, 4).PartitionBytes(type, size);
      EXPECT_EQ(partition % SizeOf(type), 0u);
      EXPECT_EQ(partition % 4096, 0u);
    }
    EXPECT_EQ(PlanOf(0, 1, 4).PartitionBytes(type, bytes), bytes / 256) << "64 a server";
    Plan small = PlanOf(0, 1, 1, {{"BYTEPS_PARTITION_BYTES", "4096"}});
    EXPECT_EQ(small.PartitionBytes(type, bytes), 4096 / SizeOf(type) * SizeOf(type));
  }
}

TEST(Plan, PartitionsAreShorterOnASlowLink) {
  Plan plan = PlanOf(0, 1, 4);
  plan.SetLink(0.5);
  EXPECT_EQ(plan.PartitionBytes(DType::kFloat32, 4 << 20), 128u << 10);
  plan.SetLink(0.2);
  EXPECT_EQ(plan.PartitionBytes(DType::kFloat32, 4 << 20), 16u * 4096) << "62,500 bytes in 2.5 ms";
  plan.SetLink(0.01);
  EXPECT_EQ(plan.PartitionBytes(DType::kFloat32, 4 << 20), 32u << 10);
  EXPECT_EQ(plan.PartitionBytes(DType::kFloat32, 64 << 20), 256u << 10) << "64 a server are longer";
  Plan asked = PlanOf(0, 1, 4, {{"BYTEPS_MIN_PARTITION_BYTES", "131072"}});
  asked.SetLink(0.01);
  EXPECT_EQ(asked.PartitionBytes(DType::kFloat32, 4 << 20), 128u << 10);
}

TEST(Plan, TooLargeForItsPartitionsSaysWhatToRaise) {
  const Plan plan = PlanOf(0, 1, 1, {{"BYTEPS_PARTITION_BYTES", "4096"}});
  try {
    plan.Declare(SpecOf("large", 4096ull * 65537));
    FAIL() << "was accepted";
  } catch (const UsageError& e) {
    EXPECT_NE(std::string(e.what()).find("raise BYTEPS_PARTITION_BYTES"), std::string::npos);
  }
}

TEST(Plan, TensorsSayHowLongReplicasWait) {
  Launch launch = LaunchOf(1, 6);
  launch.replicas = 3;
  const Settings both = {{"BYTEPS_QUORUM", "2@1.5"}};
  const Plan patient(ConfigWith(both), launch, 1);
  EXPECT_TRUE(patient.Declare(SpecOf("a", 4)).patience == (Patience{2, 2, 1500}));
  EXPECT_TRUE(Plan(ConfigWith({}), launch, 1).Declare(SpecOf("a", 4)).patience ==
              (Patience{2, 0, 0}));
  EXPECT_TRUE(PlanOf(1, 6, 1).Declare(SpecOf("a", 4)).patience == Patience());
  const std::pair<Settings, const char*> wrong[] = {
      {{{"BYTEPS_QUORUM", "2"}}, "the quorum '2' is not REPLICAS@SECONDS"},
      {{{"BYTEPS_QUORUM", "0@1"}}, "the quorum '0@1' is not REPLICAS@SECONDS"},
      {{{"BYTEPS_QUORUM", "2@0"}}, "the quorum '2@0' is not REPLICAS@SECONDS"},
      {{{"BYTEPS_QUORUM", "2@inf"}}, "the quorum '2@inf' is not REPLICAS@SECONDS"},
      {{{"BYTEPS_QUORUM", "2@1s"}}, "the quorum '2@1s' is not REPLICAS@SECONDS"},
      {{{"BYTEPS_QUORUM", "3@1"}}, "the quorum 3@1 must be of fewer than the 3 replicas"},
  };
  for (const auto& [settings, why] : wrong) {
    try {
      const Plan plan(ConfigWith(settings), launch, 1);
      ADD_FAILURE() << why;
    } catch (const UsageError& e) {
      EXPECT_EQ(std::string(e.what()).find(why), 0u) << e.what();
    }
  }
}

TEST(Plan, EachWorkerBeginsWithAServerOfItsOwn) {
  const int servers = 5;
  std::set<int> first;
  for (int rank = 0; rank < servers; ++rank) {
    const Plan plan = PlanOf(rank, servers, servers, {{"BYTEPS_PARTITION_BYTES", "4096"}});
    const Plan::Layout layout = plan.LayOut(plan.Declare(SpecOf("x", 4096 * 23)));
    ASSERT_EQ(layout.order.size(), 23u);
    first.insert(layout.servers[layout.order[0]]);
    std::set<uint32_t> all(layout.order.begin(), layout.order.end());
    EXPECT_EQ(all.size(), 23u);
    // Each round of dealing gives every server one partition.
    for (size_t begin = 0; begin < 20; begin += servers) {
      std::set<int> round;
      for (int i = 0; i < servers; ++i) round.insert(layout.servers[layout.order[begin + i]]);
      EXPECT_EQ(round.size(), 5u);
      for (int i = 0; i < servers; ++i)
        EXPECT_EQ(layout.order[begin + i] / servers, begin / servers);
    }
  }
  EXPECT_EQ(first.size(), 5u);
}

TEST(Plan, HashesAreTheSameInEveryBuild) {
  // djb2 of "65536" and "65537", modulo 1000, computed independently of this code.
  EXPECT_EQ(ServerOf(KeyHash::kDjb2, 65536, 0, 0, 1000), 582);
  EXPECT_EQ(ServerOf(KeyHash::kDjb2, 65536, 0, 1, 1000), 583);
  // Round robin, starting at the placement.
  EXPECT_EQ(ServerOf(KeyHash::kRaw, 65536, 7, 5, 5), 2);
  // All on one server, however hashed.
  EXPECT_EQ(ServerOf(KeyHash::kRaw, 65536, kOnOneServer | 7, 5, 5), 2);
  EXPECT_EQ(ServerOf(KeyHash::kRaw, 65536, kOnOneServer | 7, 6, 5), 2);
  EXPECT_EQ(ServerOf(KeyHash::kDjb2, 65536, kOnOneServer | 3, 6, 5), 3);
}

// ----- the next partition

Task TaskOf(int server, uint64_t bytes, uint64_t index) {
  Task task;
  task.server = server;
  task.bytes = bytes;
  task.index = index;
  return task;
}

// Takes a task. One must be available.
uint64_t TakeIndex(PushScheduler* scheduler) {
  Task task;
  EXPECT_TRUE(scheduler->Take(&task));
  return task.index;
}

// Returns whether no queued task can go. Adds a task of the lowest priority for the last server,
// which tests leave idle, and checks that this task is next.
bool NothingGoes(PushScheduler* scheduler, int last_server) {
  constexpr uint64_t kLast = 999;
  scheduler->Add(INT_MIN, {TaskOf(last_server, 1, kLast)});
  return TakeIndex(scheduler) == kLast;
}

TEST(PushScheduler, PriorityThenOrder) {
  PushScheduler scheduler(2, 1000);
  scheduler.Add(0, {TaskOf(0, 10, 1), TaskOf(1, 10, 2), TaskOf(0, 10, 3)});
  scheduler.Add(5, {TaskOf(1, 10, 4), TaskOf(0, 10, 5)});
  scheduler.Add(-3, {TaskOf(0, 10, 6)});
  EXPECT_EQ(scheduler.queued(), 6u);
  for (const uint64_t wanted : {4, 5, 1, 2, 3, 6}) EXPECT_EQ(TakeIndex(&scheduler), wanted);
  EXPECT_EQ(scheduler.queued(), 0u);
  EXPECT_EQ(scheduler.under_way(), 6u);
}

TEST(PushScheduler, FullServerHoldsUpNobodyElse) {
  PushScheduler scheduler(4, 20);
  scheduler.Add(9, {TaskOf(0, 10, 1), TaskOf(0, 10, 2), TaskOf(0, 10, 3), TaskOf(0, 10, 4)});
  scheduler.Add(0, {TaskOf(1, 10, 5), TaskOf(2, 10, 6)});
  for (const uint64_t wanted : {1, 2, 5, 6}) EXPECT_EQ(TakeIndex(&scheduler), wanted);
  scheduler.Return(0, 10);
  EXPECT_EQ(TakeIndex(&scheduler), 3u);
  EXPECT_EQ(scheduler.queued(), 1u);
  EXPECT_TRUE(NothingGoes(&scheduler, 3));
}

TEST(PushScheduler, WindowIsInBytes) {
  PushScheduler scheduler(2, 100);
  scheduler.Add(0, {TaskOf(0, 60, 1), TaskOf(0, 41, 2), TaskOf(0, 40, 3)});
  EXPECT_EQ(TakeIndex(&scheduler), 1u);
  scheduler.Add(1, {TaskOf(0, 40, 4)});
  EXPECT_EQ(TakeIndex(&scheduler), 4u) << "what is urgent overtakes, and fits";
  EXPECT_TRUE(NothingGoes(&scheduler, 1));
}

TEST(PushScheduler, IdleServerTakesAnySize) {
  PushScheduler scheduler(2, 100);
  scheduler.Add(0, {TaskOf(0, 5000, 1), TaskOf(0, 1, 2)});
  EXPECT_EQ(TakeIndex(&scheduler), 1u);
  EXPECT_TRUE(NothingGoes(&scheduler, 1));
}

TEST(PushScheduler, WindowByItself) {
  // 16 MiB over 8 servers, or two partitions.
  PushScheduler small(8, 0);
  small.Add(0, {TaskOf(0, 2 << 20, 1), TaskOf(0, 1, 2)});
  EXPECT_EQ(TakeIndex(&small), 1u);
  EXPECT_TRUE(NothingGoes(&small, 7));
  PushScheduler large(64, 0);
  large.Add(0, {TaskOf(0, 4096000, 1), TaskOf(0, 4096000, 2), TaskOf(0, 4096000, 3)});
  EXPECT_EQ(TakeIndex(&large), 1u);
  EXPECT_EQ(TakeIndex(&large), 2u);
  EXPECT_TRUE(NothingGoes(&large, 63));
}

TEST(PushScheduler, EachNicHasTwoPartitions) {
  PushScheduler scheduler(64, 0);
  scheduler.SetNics(2);
  std::vector<Task> tasks;
  for (uint64_t i = 0; i < 5; ++i) tasks.push_back(TaskOf(0, 4096000, i));
  scheduler.Add(0, std::move(tasks));
  for (uint64_t i = 0; i < 4; ++i) EXPECT_EQ(TakeIndex(&scheduler), i);
  EXPECT_TRUE(NothingGoes(&scheduler, 63));
}

TEST(DeliveryRate, IsTheHighestAndFallsWhileOthersWait) {
  constexpr int64_t kMs = 1'000'000;
  DeliveryRate rate;
  rate.Begin(0);
  rate.Add(500, true, 10 * kMs);
  EXPECT_FALSE(rate.BytesIn(kMs)) << "too short to know";
  rate.Add(1500, true, 20 * kMs);
  EXPECT_EQ(rate.BytesIn(kMs), 100u);
  rate.Add(4000, true, 40 * kMs);
  EXPECT_EQ(rate.BytesIn(kMs), 200u);
  rate.Add(20, true, 60 * kMs);
  EXPECT_EQ(rate.BytesIn(kMs), 198u);
  for (int i = 0; i < 100; ++i) rate.Add(20, i % 2 == 0, (70 + 10 * i) * kMs);
  EXPECT_EQ(rate.BytesIn(kMs), 198u) << "there was little to push";
  rate.Begin(5000 * kMs);
  for (int i = 1; i <= 1000; ++i) rate.Add(20, true, (5000 + 20 * i) * kMs);
  EXPECT_EQ(rate.BytesIn(kMs), 1u) << "the link has become slow";
  rate.Begin(50000 * kMs);
  rate.Add(8000, false, 50020 * kMs);
  EXPECT_EQ(rate.BytesIn(kMs), 400u) << "no less than what came";
}

TEST(DeliveryRate, PausesDoNotCount) {
  constexpr int64_t kMs = 1'000'000;
  DeliveryRate rate;
  rate.Begin(0);
  rate.Add(1000, true, 10 * kMs);
  rate.Begin(9000 * kMs);
  rate.Add(2000, true, 9020 * kMs);
  EXPECT_EQ(rate.BytesIn(kMs), 100u);
}

TEST(DeliveryRate, LittleToPushFromTheStartSaysNothing) {
  DeliveryRate rate;
  rate.Begin(0);
  rate.Add(10, false, 30'000'000);
  EXPECT_FALSE(rate.BytesIn(1));
}

TEST(PushScheduler, WindowShrinksToWhatAServerTakes) {
  PushScheduler scheduler(2, 0);
  scheduler.Add(0, {TaskOf(0, 100, 1), TaskOf(0, 100, 2), TaskOf(0, 100, 3), TaskOf(0, 100, 4)});
  for (const uint64_t wanted : {1, 2, 3}) EXPECT_EQ(TakeIndex(&scheduler), wanted);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  scheduler.Deliver(0, 100);  // at this rate, 5 ms are less than two partitions
  EXPECT_TRUE(NothingGoes(&scheduler, 1));
  scheduler.Deliver(0, 100);
  for (int i = 0; i < 2; ++i) scheduler.Answer(0, 100);
  EXPECT_EQ(TakeIndex(&scheduler), 4u);
}

TEST(PushScheduler, WindowsCanIgnoreTheRate) {
  PushScheduler scheduler(2, 0);
  scheduler.IgnoreRate();
  scheduler.Add(0, {TaskOf(0, 100, 1), TaskOf(0, 100, 2), TaskOf(0, 100, 3), TaskOf(0, 100, 4)});
  for (const uint64_t wanted : {1, 2}) EXPECT_EQ(TakeIndex(&scheduler), wanted);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  scheduler.Deliver(0, 50);  // at this rate, 5 ms are less than two partitions
  for (const uint64_t wanted : {3, 4}) EXPECT_EQ(TakeIndex(&scheduler), wanted);
}

TEST(PushScheduler, WhoIsAheadOfTheOthersStepsBack) {
  PushScheduler scheduler(3, 40);
  std::vector<Task> tasks;
  for (uint64_t i = 0; i < 20; ++i) tasks.push_back(TaskOf(0, 10, i));
  scheduler.Add(0, std::move(tasks));
  for (uint64_t i = 0; i < 4; ++i) EXPECT_EQ(TakeIndex(&scheduler), i);
  for (uint64_t i = 4; i < 6; ++i) {
    scheduler.Deliver(0, 10);
    EXPECT_EQ(TakeIndex(&scheduler), i) << "half a window waits";
  }
  for (int i = 0; i < 3; ++i) scheduler.Deliver(0, 10);
  EXPECT_TRUE(NothingGoes(&scheduler, 2)) << "more wait, and one partition is on its way";
  scheduler.Add(0, {TaskOf(1, 10, 100)});
  EXPECT_EQ(TakeIndex(&scheduler), 100u) << "at another server nothing waits";
  scheduler.Deliver(0, 10);
  EXPECT_EQ(TakeIndex(&scheduler), 6u) << "it goes on, one by one";
  EXPECT_TRUE(NothingGoes(&scheduler, 2));
  for (int i = 0; i < 3; ++i) scheduler.Answer(0, 10);
  EXPECT_TRUE(NothingGoes(&scheduler, 2));
  scheduler.Answer(0, 10);  // now only half a window waits
  for (const uint64_t wanted : {7, 8, 9}) EXPECT_EQ(TakeIndex(&scheduler), wanted);
  EXPECT_TRUE(NothingGoes(&scheduler, 2));
}

TEST(PushScheduler, AnAnswerMayComeBeforeTheDelivery) {
  PushScheduler scheduler(2, 20);
  scheduler.Add(0, {TaskOf(0, 10, 1), TaskOf(0, 10, 2), TaskOf(0, 10, 3)});
  for (const uint64_t wanted : {1, 2}) EXPECT_EQ(TakeIndex(&scheduler), wanted);
  scheduler.Answer(0, 10);
  EXPECT_TRUE(NothingGoes(&scheduler, 1));
  scheduler.Deliver(0, 10);
  EXPECT_EQ(TakeIndex(&scheduler), 3u);
}

TEST(PushScheduler, WhatIsDroppedIsNotWaitedFor) {
  PushScheduler scheduler(2, 20);
  for (uint64_t i = 0; i < 10; ++i) {
    scheduler.Add(0, {TaskOf(0, 10, i)});
    EXPECT_EQ(TakeIndex(&scheduler), i);
    scheduler.Return(0, 10);
  }
  scheduler.Add(0, {TaskOf(0, 10, 11), TaskOf(0, 10, 12)});
  for (const uint64_t wanted : {11, 12}) EXPECT_EQ(TakeIndex(&scheduler), wanted);
}

TEST(PushScheduler, CallerTakesOnlyWhatWouldGoFirst) {
  PushScheduler scheduler(2, 20);
  EXPECT_TRUE(scheduler.AddOrTake(0, TaskOf(0, 10, 1)));
  scheduler.Add(3, {TaskOf(1, 10, 2)});
  EXPECT_FALSE(scheduler.AddOrTake(1, TaskOf(0, 10, 3))) << "one of higher priority can go";
  EXPECT_EQ(TakeIndex(&scheduler), 2u);
  EXPECT_EQ(TakeIndex(&scheduler), 3u);
  EXPECT_FALSE(scheduler.AddOrTake(9, TaskOf(0, 10, 4))) << "its server's window is full";
  EXPECT_EQ(scheduler.under_way(), 3u);
}

TEST(PushScheduler, WhatIsResumedGoesOn) {
  PushScheduler scheduler(1, 10);
  scheduler.Add(0, {TaskOf(0, 10, 1), TaskOf(0, 10, 2)});
  Task task;
  ASSERT_TRUE(scheduler.Take(&task));
  task.stage = Task::kSend;
  scheduler.Resume(task);
  ASSERT_TRUE(scheduler.Take(&task));
  EXPECT_EQ(task.index, 1u);
  EXPECT_EQ(task.stage, Task::kSend);
  EXPECT_EQ(scheduler.under_way(), 1u) << "it is counted once";
  scheduler.Return(0, 10);
  EXPECT_EQ(TakeIndex(&scheduler), 2u);
}

TEST(PushScheduler, ClearEmptiesTheQueues) {
  PushScheduler scheduler(3, 10);
  scheduler.Add(0, {TaskOf(0, 10, 1), TaskOf(1, 10, 2), TaskOf(1, 10, 3)});
  EXPECT_EQ(TakeIndex(&scheduler), 1u);
  EXPECT_EQ(scheduler.Clear().size(), 2u);
  scheduler.Return(0, 10);
  EXPECT_EQ(scheduler.under_way(), 0u);
  EXPECT_TRUE(NothingGoes(&scheduler, 2));
}

TEST(PushScheduler, ManyThreadsKeepToTheWindows) {
  constexpr int kServers = 7, kTasks = 3000, kBytes = 10, kWindow = 35;
  PushScheduler scheduler(kServers, kWindow);
  std::atomic<int> under_way[kServers] = {}, most{0}, taken{0};
  std::vector<std::thread> takers;
  for (int i = 0; i < 4; ++i) {
    takers.emplace_back([&] {
      Task task;
      while (scheduler.Take(&task)) {
        const int now = under_way[task.server] += kBytes;
        for (int seen = most; now > seen && !most.compare_exchange_weak(seen, now);) {
        }
        std::this_thread::yield();
        under_way[task.server] -= kBytes;
        scheduler.Return(task.server, kBytes);
        if (++taken == kTasks) scheduler.Close();
      }
    });
  }
  for (int i = 0; i < kTasks; ++i) scheduler.Add(i % 5, {TaskOf(i % kServers, kBytes, i)});
  for (auto& taker : takers) taker.join();
  EXPECT_EQ(taken, kTasks);
  EXPECT_LE(most, kWindow);
  EXPECT_EQ(scheduler.under_way(), 0u);
}

// Not every partition wakes a thread, but no partition may be forgotten, for any sizes and window.
TEST(PushScheduler, WhoSleepsIsWokenInTime) {
  constexpr int kTasks = 200;
  std::mt19937 random(1);
  for (const uint64_t window : {0, 1, 10, 100, 1000, 10000}) {
    for (const int nics : {1, 3}) {
      SCOPED_TRACE(testing::Message() << "window " << window << ", " << nics << " NICs");
      PushScheduler scheduler(2, window);
      scheduler.SetNics(nics);
      BlockingQueue<Task> sent;
      std::thread taker([&] {
        Task task;
        while (scheduler.Take(&task)) sent.Push(task);
      });
      std::vector<Task> tasks;
      for (int i = 0; i < kTasks; ++i) tasks.push_back(TaskOf(i % 2, random() % 4 * 50 + 1, i));
      scheduler.Add(0, tasks);
      // Tasks are taken one by one, so that threads that were not woken are asleep.
      for (int i = 0; i < kTasks; ++i) {
        Task task;
        bool timed_out = false;
        if (!sent.PopFor(&task, std::chrono::seconds(60), &timed_out)) {
          ADD_FAILURE() << i << " were taken";
          break;
        }
        scheduler.Deliver(task.server, task.bytes);
        scheduler.Answer(task.server, task.bytes);
      }
      EXPECT_EQ(scheduler.under_way(), 0u);
      scheduler.Close();
      taker.join();
    }
  }
}

}  // namespace
}  // namespace core
}  // namespace byteps
