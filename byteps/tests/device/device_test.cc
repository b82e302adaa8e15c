// Tests of pinned memory, and of copies on the simulated GPU (device/fake.cc).
#include "byteps/device/device.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <future>
#include <new>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/device/copy_queue.h"
#include "byteps/device/device.h"
#include "byteps/device/device_copies.h"
#include "byteps/device/fake.h"
#include "byteps/device/pinned_pool.h"
#include "tests/support/kit.h"

namespace byteps {
namespace core {
namespace {

// Memory of these tests' pools, from the heap.
class Heap {
 public:
  PinnedPool::Allocate allocate() {
    return [this](size_t bytes) {
      slabs_.emplace_back(bytes);
      return slabs_.back().data();
    };
  }

 private:
  std::vector<std::vector<char>> slabs_;
};

TEST(PinnedPool, IsBounded) {
  Heap heap;
  PinnedPool pool(40 << 10, 16 << 10, heap.allocate());
  EXPECT_EQ(pool.TryTake(1), nullptr) << "nothing was reserved";
  pool.Reserve(1);
  EXPECT_EQ(pool.pinned_bytes(), 16u << 10);
  pool.Reserve(1 << 30);
  EXPECT_EQ(pool.pinned_bytes(), 32u << 10);
  std::vector<PinnedBlock> blocks;
  while (PinnedBlock block = pool.TryTake(4096)) blocks.push_back(std::move(block));
  EXPECT_EQ(blocks.size(), 8u);
  EXPECT_EQ(pool.bytes_in_use(), 32u << 10);
}

TEST(PinnedPool, AlwaysHasRoomForOnePartition) {
  Heap heap;
  PinnedPool pool(1, 1 << 20, heap.allocate());
  pool.Reserve(10);
  EXPECT_EQ(pool.pinned_bytes(), 1u << 20);
  EXPECT_NE(pool.TryTake(1 << 20), nullptr);
}

TEST(PinnedPool, HalvesAreJoinedAgain) {
  Heap heap;
  PinnedPool pool(64 << 10, 64 << 10, heap.allocate());
  pool.Reserve(1);
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    std::vector<PinnedBlock> blocks;
    while (PinnedBlock block = pool.TryTake(1 + random() % 16000)) blocks.push_back(block);
    std::shuffle(blocks.begin(), blocks.end(), random);
    blocks.clear();
    ASSERT_EQ(pool.bytes_in_use(), 0u);
    ASSERT_NE(pool.TryTake(64 << 10), nullptr) << "round " << round;
  }
}

TEST(PinnedPool, BlocksDoNotOverlap) {
  Heap heap;
  PinnedPool pool(1 << 20, 64 << 10, heap.allocate());
  pool.Reserve(1 << 20);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 3000; ++i) {
        const size_t bytes = 1 + random() % 40000;
        const PinnedBlock block = pool.TryTake(bytes);
        if (!block) continue;
        memset(block.get(), t, bytes);
        std::this_thread::yield();
        for (size_t at = 0; at < bytes; at += 97) wrong += block.get()[at] != t;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(pool.bytes_in_use(), 0u);
}

TEST(PinnedPool, WaitersAreServedInTheirOrder) {
  Heap heap;
  PinnedPool pool(4096, 4096, heap.allocate());
  pool.Reserve(1);
  PinnedBlock held = pool.TakeOrCall(10, nullptr);
  ASSERT_NE(held, nullptr);
  std::vector<int> order;
  std::vector<PinnedBlock> kept;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(pool.TakeOrCall(10,
                              [&, i](PinnedBlock block) {
                                order.push_back(i);
                                kept.push_back(std::move(block));
                              }),
              nullptr);
  }
  held.reset();
  EXPECT_EQ(order, std::vector<int>({0}));
  std::vector<PinnedBlock> given_back;
  given_back.swap(kept);
  given_back.clear();
  EXPECT_EQ(order, std::vector<int>({0, 1}));
  // The blocks are swapped out first, because blocks that are returned during clear() would be
  // added to the same vector.
  given_back.swap(kept);
  given_back.clear();
  EXPECT_EQ(order, std::vector<int>({0, 1, 2}));
  given_back.swap(kept);
}

TEST(PinnedPool, ManyWhoGiveUpAtOnceDoNotNest) {
  Heap heap;
  PinnedPool pool(4096, 4096, heap.allocate());
  pool.Reserve(1);
  PinnedBlock held = pool.TryTake(10);
  int called = 0;
  for (int i = 0; i < 500'000; ++i) {
    EXPECT_EQ(pool.TakeOrCall(10, [&](const PinnedBlock&) { ++called; }), nullptr);
  }
  held.reset();  // nested calls would exhaust the stack
  EXPECT_EQ(called, 500'000);
}

TEST(DeviceCopies, KeepTheCallersDevice) {
  fake::SetCurrentDevice(0);
  auto* const pool = PinnedPool::Shared(PinnedPool::Use::kPartitions, 1 << 20, 4096);
  pool->Reserve(4096);
  DeviceCopies* const copies = DeviceCopies::Of(1);
  const PinnedBlock block = pool->TryTake(100);
  char data[100] = {}, back[100] = {};
  std::promise<void> here, there;
  memset(data, 7, sizeof(data));
  EXPECT_EQ(fake::CurrentDeviceNumber(), 0);
  copies->CallAfter(CopyLane::kToHost,
                    copies->Enqueue(CopyLane::kToHost, {{block.get(), data, 100}}),
                    [&] { here.set_value(); });
  EXPECT_EQ(fake::CurrentDeviceNumber(), 0);
  here.get_future().wait();
  copies->CallAfter(CopyLane::kToDevice,
                    copies->Enqueue(CopyLane::kToDevice, {{back, block.get(), 100}}),
                    [&] { there.set_value(); });
  EXPECT_EQ(fake::CurrentDeviceNumber(), 0);
  there.get_future().wait();
  EXPECT_EQ(memcmp(data, back, 100), 0);
  EXPECT_EQ(fake::CurrentDeviceNumber(), 0);
}

TEST(DeviceCopies, AreAwaitedForAMomentOnly) {
  fake::SetCurrentDevice(0);
  auto* const pool = PinnedPool::Shared(PinnedPool::Use::kPartitions, 1 << 20, 4096);
  pool->Reserve(4096);
  DeviceCopies* const copies = DeviceCopies::Of(1);
  const PinnedBlock block = pool->TryTake(100);
  char data[100];
  memset(data, 9, sizeof(data));
  const auto hold = fake::HoldCopiesToHost();
  std::promise<void> here;
  const auto await = [&](std::promise<void>* called) {
    constexpr CopyLane kLane = CopyLane::kFewToHost;
    return copies->AwaitOrCallAfter(kLane, copies->Enqueue(kLane, {{block.get(), data, 100}}),
                                    [called] { called->set_value(); });
  };
  EXPECT_FALSE(await(&here));
  EXPECT_EQ(fake::CurrentDeviceNumber(), 0);
  hold->set_value();
  here.get_future().wait();
  EXPECT_EQ(memcmp(data, block.get(), 100), 0);

  // Without other work, a copy is done while the queue polls. A busy machine may need some tries.
  bool awaited = false;
  for (int i = 0; !awaited; ++i) {
    memset(data, i, sizeof(data));
    std::promise<void> called;
    awaited = await(&called);
    if (!awaited) called.get_future().wait();
    EXPECT_EQ(memcmp(data, block.get(), 100), 0);
  }
}

TEST(CopyQueue, WhatComesMeanwhileGoesWithTheNextTurn) {
  fake::SetCurrentDevice(0);
  constexpr size_t kLong = 2 << 20;  // too long to be polled
  constexpr int kMore = 5;
  static char* const host = static_cast<char*>(PinMemory(kLong));  // never unpinned
  std::vector<char> data(kLong);
  std::iota(host, host + kLong, 1);
  CopyQueue queue(1, CopyLane::kToDevice);
  std::promise<void> in_turn, go_on, all_done;
  std::atomic<int> begun{0}, done{0};
  const auto entry = [&](int i) {
    CopyQueue::Entry one;
    // The long copy comes first; the short copies are of bytes at its end.
    const size_t at = i == 0 ? 0 : kLong - i;
    one.copy = {&data[at], host + at, i == 0 ? kLong - kMore : 1};
    one.done = [&] {
      if (++done == kMore + 1) all_done.set_value();
    };
    return one;
  };
  std::thread first([&] {
    CopyQueue::Entry one = entry(0);
    one.begun = [&](const std::string& error) {
      EXPECT_EQ(error, "");
      in_turn.set_value();
      go_on.get_future().wait();
    };
    queue.Add(one);
    EXPECT_EQ(begun, kMore) << "this thread gave the others' to the device, too";
  });
  in_turn.get_future().wait();
  for (int i = 1; i <= kMore; ++i) {
    CopyQueue::Entry one = entry(i);
    one.begun = [&, taker = first.get_id()](const std::string& error) {
      EXPECT_EQ(error, "");
      EXPECT_EQ(std::this_thread::get_id(), taker);
      ++begun;
    };
    queue.Add(one);  // Add returns, although the first copy is in its turn.
  }
  EXPECT_EQ(begun, 0);
  go_on.set_value();
  first.join();
  all_done.get_future().wait();
  EXPECT_EQ(memcmp(host, data.data(), data.size()), 0);
}

TEST(CopyQueue, FailureOfTheDeviceIsToldAll) {
  for (const CopyLane lane : {CopyLane::kToDevice, CopyLane::kToHost}) {
    CopyQueue queue(0, lane);
    int failed = 0;
    fake::SetBroken(true);
    for (int i = 0; i < 3; ++i) {
      CopyQueue::Entry entry;
      entry.copy = {nullptr, nullptr, 1};
      entry.begun = [&](const std::string& error) { failed += error.find("broken") != error.npos; };
      entry.done = [] { FAIL() << "it was never made"; };
      queue.Add(entry);
    }
    fake::SetBroken(false);
    EXPECT_EQ(failed, 3);
  }
}

// A thread may lack memory while it gives copies to the device. It then reports each of these
// copies once, and the queue goes on.
TEST(CopyQueue, LackOfMemoryIsTold) {
  fake::SetCurrentDevice(0);
  static char* const host = static_cast<char*>(PinMemory(4096));  // never unpinned
  static char data[4096];
  CopyQueue queue(1, CopyLane::kToDevice);
  // Number of allocations that succeed: all, which makes the device ready; none; one, for the
  // entry; two, for the entry and the next thing; and all again.
  for (const int times : {-1, 0, 1, 2, -1}) {
    int begun = 0;
    bool lacked = false;
    std::promise<void> done;
    CopyQueue::Entry entry;
    entry.copy = {data, host, sizeof(data)};
    entry.begun = [&begun, &lacked](const std::string& error) {
      ++begun;
      lacked = error.find("out of memory") != error.npos;
    };
    entry.done = [&] { done.set_value(); };
    {
      const MemoryOnlyTimes little(times);
      if (times == 0) {
        EXPECT_THROW(queue.Add(entry), std::bad_alloc);
      } else {
        queue.Add(entry);
      }
    }
    EXPECT_EQ(begun, times == 0 ? 0 : 1) << times;
    EXPECT_EQ(lacked, times > 0) << times;
    if (times < 0) done.get_future().wait();
  }
}

// Leave is for callers that must not give copies to the device themselves. It succeeds only while
// another thread gives copies.
TEST(CopyQueue, CopiesAreLeftToWhoGivesOthers) {
  fake::SetCurrentDevice(0);
  auto* const pool = PinnedPool::Shared(PinnedPool::Use::kPartitions, 1 << 20, 4096);
  pool->Reserve(4096);
  const PinnedBlock block = pool->TryTake(4096);
  char data[2] = {3, 4};
  CopyQueue queue(1, CopyLane::kToHost);
  std::promise<void> second_done;
  CopyQueue::Entry two;
  two.copy = {block.get() + 1, &data[1], 1};
  std::thread::id teller;
  two.begun = [&](const std::string& error) {
    EXPECT_EQ(error, "");
    teller = std::this_thread::get_id();
  };
  two.done = [&] { second_done.set_value(); };
  EXPECT_FALSE(queue.Leave(&two)) << "there is nobody";

  std::promise<void> told, go_on;
  std::thread first([&] {
    CopyQueue::Entry one;
    one.copy = {block.get(), &data[0], 1};
    one.begun = [&](const std::string& error) {
      EXPECT_EQ(error, "");
      told.set_value();
      go_on.get_future().wait();
    };
    one.done = [] {};
    queue.Add(one);
  });
  const std::thread::id giver = first.get_id();
  told.get_future().wait();
  EXPECT_TRUE(queue.Leave(&two));
  go_on.set_value();
  first.join();
  second_done.get_future().wait();
  EXPECT_EQ(teller, giver);
  EXPECT_EQ(memcmp(block.get(), data, 2), 0);
  EXPECT_FALSE(queue.Leave(&two)) << "the thread that gave copies has gone";
}

// The driver reports the end of a long copy, so that no other copy waits for it.
TEST(CopyQueue, ALongWaitIsLeftToTheDriver) {
  fake::SetCurrentDevice(0);
  auto* const pool = PinnedPool::Shared(PinnedPool::Use::kPartitions, 1 << 20, 4096);
  pool->Reserve(4096);
  const PinnedBlock block = pool->TryTake(4096);
  char data[3] = {5, 6, 7};
  CopyQueue queue(1, CopyLane::kToHost);
  const auto hold = fake::HoldCopiesToHost();
  std::promise<void> all_done;
  std::atomic<int> begun{0}, done{0};
  for (int i = 0; i < 3; ++i) {
    CopyQueue::Entry one;
    one.copy = {block.get() + i, &data[i], 1};
    one.begun = [&](const std::string& error) {
      EXPECT_EQ(error, "");
      ++begun;
    };
    one.done = [&] {
      if (++done == 3) all_done.set_value();
    };
    queue.Add(one);  // Leave returns, although no copy is done.
    EXPECT_EQ(begun, i + 1);
  }
  EXPECT_EQ(done, 0);
  hold->set_value();
  all_done.get_future().wait();
  EXPECT_EQ(memcmp(block.get(), data, 3), 0);
}

TEST(DeviceCopies, StreamsOfTheCallersWaitForThemselvesOnly) {
  fake::SetCurrentDevice(0);
  DeviceCopies* const copies = DeviceCopies::Of(0);
  const DeviceStream busy = MakeStream(), idle = MakeStream();
  const auto hold = fake::Hold(busy);
  const DeviceMoment late = copies->Now(busy), early = copies->Now(idle);
  std::promise<void> after_busy, after_idle;
  copies->CallAfter(late, busy, [&] { after_busy.set_value(); });
  copies->CallAfter(early, idle, [&] { after_idle.set_value(); });
  after_idle.get_future().wait();  // would not be called if it were queued after the other
  EXPECT_FALSE(DeviceCopies::IsDone(late));
  hold->set_value();
  after_busy.get_future().wait();
  EXPECT_TRUE(DeviceCopies::IsDone(late));
}

TEST(DeviceCopies, WorkOfAnIdleStreamIsDone) {
  fake::SetCurrentDevice(0);
  DeviceCopies* const copies = DeviceCopies::Of(0);
  const DeviceStream stream = MakeStream();
  EXPECT_EQ(copies->Now(stream), nullptr);
  EXPECT_TRUE(DeviceCopies::IsDone(nullptr));
  const auto hold = fake::Hold(stream);
  EXPECT_NE(copies->Now(stream), nullptr);
  hold->set_value();
  fake::Synchronize(stream);
}

TEST(DeviceCopies, FailuresAreErrors) {
  DeviceCopies* const copies = DeviceCopies::Of(0);
  fake::SetBroken(true);
  EXPECT_THROW(copies->Now(nullptr), Error);
  EXPECT_THROW(copies->CopiedToDevice(), Error);
  EXPECT_THROW(copies->Check(), Error);
  fake::SetBroken(false);
}

}  // namespace
}  // namespace core
}  // namespace byteps
