#include "byteps/device/fake.h"

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/mutex.h"

namespace byteps {
namespace core {
namespace {

using Work = std::function<void()>;
using Done = std::shared_future<void>;

thread_local int current_device = 0;
thread_local std::vector<int> devices_before;  // devices to restore when their scopes end
thread_local bool in_callback = false;
std::atomic<bool> broken{false};

// Blocks the copies of a direction.
class Gate {
 public:
  std::shared_ptr<std::promise<void>> Hold() {
    auto promise = std::make_shared<std::promise<void>>();
    ps::MutexLock lock(&mu_);
    released_ = promise->get_future().share();
    return promise;
  }

  void Await() {
    Done released;
    {
      ps::MutexLock lock(&mu_);
      released = released_;
    }
    if (released.valid()) released.wait();
  }

 private:
  ps::Mutex mu_;
  Done released_ PS_GUARDED_BY(mu_);  // invalid if copies are not blocked
};

// The gates are never destroyed, because streams' threads use them to the end.
Gate& to_device = *new Gate;
Gate& to_host = *new Gate;
Gate& calls = *new Gate;
std::atomic<std::thread::id> caller;  // the thread that `calls` does not block

class Stream {
 public:
  explicit Stream(int device) : device_(device), thread_([this] { Run(); }) { thread_.detach(); }

  int device() const { return device_; }

  void Enqueue(Work work) {
    {
      ps::MutexLock lock(&mu_);
      work_.push_back(std::move(work));
    }
    cond_.NotifyOne();
  }

  bool idle() {
    ps::MutexLock lock(&mu_);
    return IsIdle();
  }

  void AwaitIdle() {
    ps::MutexLock lock(&mu_);
    // The wait is ended by the stream's own thread; deadline: none, because a real driver has none.
    idle_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return IsIdle(); });
  }

 private:
  void Run() {
    while (true) {
      Work work;
      {
        ps::MutexLock lock(&mu_);
        cond_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return !work_.empty(); });
        work = std::move(work_.front());
        work_.pop_front();
        working_ = true;
      }
      work();
      ps::MutexLock lock(&mu_);
      working_ = false;
      if (IsIdle()) idle_.NotifyAll();
    }
  }

  bool IsIdle() const PS_REQUIRES(mu_) { return work_.empty() && !working_; }

  const int device_;
  ps::Mutex mu_;
  ps::CondVar cond_;
  ps::CondVar idle_;
  std::deque<Work> work_ PS_GUARDED_BY(mu_);
  bool working_ PS_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

struct Event {
  int device;
  ps::Mutex mu;
  Done recorded PS_GUARDED_BY(mu);  // invalid if nothing is recorded
};

constexpr size_t kReserved = 1ull << 35;  // addresses for pinned memory

ps::Mutex pinned_mu;
std::map<const char*, size_t> pinned PS_GUARDED_BY(pinned_mu);

void Enter() {
  if (in_callback) {
    fprintf(stderr, "the device was called from a callback\n");
    abort();
  }
  if (caller.load() != std::this_thread::get_id()) calls.Await();
  if (broken) throw Error("the fake device is broken");
}

Stream* Of(DeviceStream stream) {
  static ps::Mutex mu;
  static auto* defaults = new std::map<int, Stream*>();  // by device
  if (stream == nullptr) {
    ps::MutexLock lock(&mu);
    auto& own = (*defaults)[current_device];
    if (own == nullptr) own = new Stream(current_device);
    return own;
  }
  auto* const given = static_cast<Stream*>(stream);
  if (given->device() != current_device) throw Error("another device is current");
  return given;
}

Event* Of(DeviceEvent event, bool on_current) {
  auto* const given = static_cast<Event*>(event);
  if (on_current && given->device != current_device) throw Error("another device is current");
  return given;
}

void DemandPinned(const void* memory, size_t bytes) {
  const char* const begin = static_cast<const char*>(memory);
  ps::MutexLock lock(&pinned_mu);
  const auto after = pinned.upper_bound(begin);
  if (after == pinned.begin()) throw Error("the host memory is not pinned");
  const auto slab = std::prev(after);
  if (begin + bytes > slab->first + slab->second) throw Error("the host memory is not pinned");
}

std::atomic<uint64_t> copies{0};

void Enqueue(void* to, const void* from, size_t bytes, DeviceStream stream, Gate* gate) {
  ++copies;
  Of(stream)->Enqueue([to, from, bytes, gate] {
    gate->Await();
    memcpy(to, from, bytes);
  });
}

}  // namespace

CurrentDevice::CurrentDevice(int device) {
  Enter();
  devices_before.push_back(current_device);
  current_device = device;
}

CurrentDevice::~CurrentDevice() {
  current_device = devices_before.back();
  devices_before.pop_back();
}

DeviceStream MakeStream() {
  Enter();
  return new Stream(current_device);
}

DeviceEvent MakeEvent() {
  Enter();
  return new Event{current_device, {}, {}};
}

void RecordEvent(DeviceEvent event, DeviceStream stream) {
  Enter();
  auto promise = std::make_shared<std::promise<void>>();
  Event* const given = Of(event, true);
  {
    ps::MutexLock lock(&given->mu);
    given->recorded = promise->get_future().share();
  }
  Of(stream)->Enqueue([promise] { promise->set_value(); });
}

bool EventIsDone(DeviceEvent event) {
  Enter();
  Event* const given = Of(event, false);
  ps::MutexLock lock(&given->mu);
  return !given->recorded.valid() ||
         given->recorded.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

bool StreamIsIdle(DeviceStream stream) {
  Enter();
  return Of(stream)->idle();
}

void WaitForEvent(DeviceStream stream, DeviceEvent event) {
  Enter();
  Event* const given = Of(event, false);
  ps::MutexLock lock(&given->mu);
  if (!given->recorded.valid()) return;
  Of(stream)->Enqueue([recorded = given->recorded] { recorded.wait(); });
}

void WaitForWord(DeviceStream stream, const DeviceWord* word) {
  Enter();
  DemandPinned(word, sizeof *word);
  Of(stream)->Enqueue([word] {
    while (word->load(std::memory_order_acquire) != 1) std::this_thread::yield();
  });
}

void CopyToHost(void* host, const void* device, size_t bytes, DeviceStream stream) {
  Enter();
  DemandPinned(host, bytes);
  Enqueue(host, device, bytes, stream, &to_host);
}

void CopyToDevice(void* device, const void* host, size_t bytes, DeviceStream stream) {
  Enter();
  DemandPinned(host, bytes);
  Enqueue(device, host, bytes, stream, &to_device);
}

void CallWhenDone(DeviceStream stream, std::function<void()> then) {
  Enter();
  Of(stream)->Enqueue([then = std::move(then)] {
    if (broken) return;
    in_callback = true;
    then();
    in_callback = false;
  });
}

void* PinMemory(size_t bytes) {
  Enter();
  ps::MutexLock lock(&pinned_mu);
  // Allocations are adjacent, as with a driver. So a copy that is too long reaches into the next
  // allocation, which must not happen.
  static char* next = static_cast<char*>(
      mmap(nullptr, kReserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  char* const memory = next;
  next += (bytes + 4095) / 4096 * 4096;
  if (mprotect(memory, next - memory, PROT_READ | PROT_WRITE) != 0) {
    throw Error("the fake device has no memory");
  }
  memset(memory, 0xa5, bytes);
  pinned[memory] = bytes;
  return memory;
}

namespace fake {

std::shared_ptr<std::promise<void>> Hold(DeviceStream stream) {
  auto promise = std::make_shared<std::promise<void>>();
  Of(stream)->Enqueue([released = promise->get_future().share()] { released.wait(); });
  return promise;
}

std::shared_ptr<std::promise<void>> HoldCopiesToDevice() { return to_device.Hold(); }
std::shared_ptr<std::promise<void>> HoldCopiesToHost() { return to_host.Hold(); }

std::shared_ptr<std::promise<void>> HoldCalls() {
  caller = std::this_thread::get_id();
  return calls.Hold();
}

void Synchronize(DeviceStream stream) { Of(stream)->AwaitIdle(); }

int CurrentDeviceNumber() { return current_device; }
void SetCurrentDevice(int device) { current_device = device; }
void SetBroken(bool now) { broken = now; }

uint64_t PinnedBytes() {
  ps::MutexLock lock(&pinned_mu);
  uint64_t bytes = 0;
  for (const auto& slab : pinned) bytes += slab.second;
  return bytes;
}

uint64_t CountCopies() { return copies; }

}  // namespace fake
}  // namespace core
}  // namespace byteps
