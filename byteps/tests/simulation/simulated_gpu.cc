// A GPU in simulated time: implements byteps/device/device.h in place of fake.cc.
//
// A thread of the job does the streams' work, a piece at a time, from a stream that the seed picks.
// Streams, events and pinned memory live as long as the process, as in the engine. MakeGpu makes
// all of them in advance, so that each seed finds the same objects.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/device/device.h"
#include "byteps/device/device_copies.h"
#include "byteps/device/pinned_pool.h"
#include "byteps/engine/staged_sum.h"
#include "world.h"

namespace byteps {
namespace core {

// A stream waits for what was recorded when its wait began; later recordings do not matter.
struct Event {
  uint64_t recorded = 0;  // number of recordings
  std::set<uint64_t> pending;

  bool IsDone(uint64_t number) const { return pending.count(number) == 0; }
};

struct Work {
  const Event* waits_for = nullptr;  // event, in its present recording
  uint64_t number = 0;
  bool takes_time = false;
  std::function<void()> then;
  const DeviceWord* word = nullptr;  // waits until it is 1

  bool MayBegin() const {
    if (word != nullptr) return *word == 1;
    return waits_for == nullptr || waits_for->IsDone(number);
  }
};

struct Stream {
  std::deque<Work> work;
  bool working = false;
};

namespace {

constexpr auto kLook = std::chrono::microseconds(10);
constexpr auto kLookForWord = std::chrono::microseconds(500);
constexpr uint64_t kLongestUs = 300;  // duration of a copy

// Used by one thread at a time, except for waiting on `more`.
std::mutex mu;
std::condition_variable more;
std::vector<Stream*>* const streams = new std::vector<Stream*>;

Stream* StreamOf(DeviceStream stream) { return static_cast<Stream*>(stream); }
Event* EventOf(DeviceEvent event) { return static_cast<Event*>(event); }

void Enqueue(DeviceStream stream, Work work) {
  {
    std::lock_guard<std::mutex> lock(mu);
    StreamOf(stream)->work.push_back(std::move(work));
  }
  more.notify_one();
}

void CopyBytes(void* to, const void* from, size_t bytes, DeviceStream stream) {
  Enqueue(stream, {nullptr, 0, true, [=] { memcpy(to, from, bytes); }});
}

}  // namespace

CurrentDevice::CurrentDevice(int) {}
CurrentDevice::~CurrentDevice() {}

DeviceStream MakeStream() {
  streams->push_back(new Stream);
  return streams->back();
}

DeviceEvent MakeEvent() { return new Event; }

void RecordEvent(DeviceEvent event, DeviceStream stream) {
  Event* const recorded = EventOf(event);
  const uint64_t number = ++recorded->recorded;
  recorded->pending.insert(number);
  Enqueue(stream, {nullptr, 0, false, [=] { recorded->pending.erase(number); }});
}

bool EventIsDone(DeviceEvent event) {
  // Time has to pass for a thread that polls.
  std::this_thread::sleep_for(kLook);
  return EventOf(event)->IsDone(EventOf(event)->recorded);
}

bool StreamIsIdle(DeviceStream stream) {
  return StreamOf(stream)->work.empty() && !StreamOf(stream)->working;
}

void WaitForEvent(DeviceStream stream, DeviceEvent event) {
  Enqueue(stream, {EventOf(event), EventOf(event)->recorded, false, [] {}});
}

void WaitForWord(DeviceStream stream, const DeviceWord* word) {
  Enqueue(stream, {nullptr, 0, false, [] {}, word});
}

void CopyToHost(void* host, const void* device, size_t bytes, DeviceStream stream) {
  CopyBytes(host, device, bytes, stream);
}

void CopyToDevice(void* device, const void* host, size_t bytes, DeviceStream stream) {
  CopyBytes(device, host, bytes, stream);
}

void CallWhenDone(DeviceStream stream, std::function<void()> then) {
  Enqueue(stream, {nullptr, 0, false, std::move(then)});
}

void* PinMemory(size_t bytes) { return aligned_alloc(4096, (bytes + 4095) / 4096 * 4096); }

}  // namespace core

namespace simulation {

using core::streams;

namespace {

core::DeviceStream user_stream = nullptr;

}  // namespace

void MakeGpu(uint64_t pinned_bytes, uint64_t streamed_bytes, uint64_t largest) {
  user_stream = core::MakeStream();
  core::DeviceCopies* const copies = core::DeviceCopies::Of(kGpu);
  copies->CallAfter(nullptr, user_stream, [] {});  // makes the stream for its callbacks
  for (core::Stream* stream : *streams) stream->work.clear();
  using core::PinnedPool;
  PinnedPool::Shared(PinnedPool::Use::kPartitions, pinned_bytes, largest)->Reserve(pinned_bytes);
  const uint64_t block = core::StagedSum::LargestBlock(streamed_bytes, largest);
  PinnedPool::Shared(PinnedPool::Use::kStreamedSums, streamed_bytes, block)
      ->Reserve(streamed_bytes);
}

core::DeviceStream UserStream() { return user_stream; }

void Compute(std::function<void()> work) {
  core::Enqueue(user_stream, {nullptr, 0, true, std::move(work)});
}

Gpu::Gpu() {
  thread_ = std::thread([this] { Run(); });
  pthread_setname_np(thread_.native_handle(), "gpu");
}

Gpu::~Gpu() {
  {
    std::lock_guard<std::mutex> lock(core::mu);
    stopping_ = true;
  }
  core::more.notify_one();
  thread_.join();
}

void Gpu::AwaitIdle() {
  const auto is_idle = [](core::Stream* stream) { return core::StreamIsIdle(stream); };
  while (!std::all_of(streams->begin(), streams->end(), is_idle)) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void Gpu::Run() {
  while (core::Stream* const stream = Next()) {
    core::Work work = std::move(stream->work.front());
    stream->work.pop_front();
    stream->working = true;
    if (work.takes_time) {
      std::this_thread::sleep_for(std::chrono::microseconds(1 + Random(core::kLongestUs)));
    }
    work.then();
    work = core::Work();
    stream->working = false;
  }
}

core::Stream* Gpu::Next() {
  std::unique_lock<std::mutex> lock(core::mu);
  while (true) {
    std::vector<core::Stream*> ready;
    bool idle = true, for_word = false;
    for (core::Stream* stream : *streams) {
      idle = idle && stream->work.empty();
      for_word = for_word || (!stream->work.empty() && stream->work.front().word != nullptr);
      if (!stream->work.empty() && stream->work.front().MayBegin()) ready.push_back(stream);
    }
    if (!ready.empty()) return ready[Random(ready.size())];
    if (idle && stopping_) return nullptr;
    if (for_word) {  // nothing signals a word that is set
      core::more.wait_for(lock, core::kLookForWord);
    } else {
      core::more.wait(lock);
    }
  }
}

}  // namespace simulation
}  // namespace byteps
