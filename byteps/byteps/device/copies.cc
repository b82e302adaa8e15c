// Copies between a GPU and pinned memory, their queues, and the pool of that memory.
#include <algorithm>
#include <chrono>
#include <exception>
#include <iterator>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/device/device.h"
#include "byteps/net/link/registration_cache.h"

namespace byteps {
namespace core {
namespace {

// Callers' streams that have a stream of their own for calls; further ones share these.
constexpr size_t kMaxCallers = 32;
// 128 KiB take 10 to 30 us, and 1 MiB 50; a call by the driver comes 40 us after that.
constexpr std::chrono::microseconds kAwaited(100);

}  // namespace

// Events that nobody uses.
class DeviceCopies::Events : public std::enable_shared_from_this<DeviceCopies::Events> {
 public:
  DeviceMoment Take() {
    DeviceEvent event = nullptr;
    {
      ps::MutexLock lock(&mu_);
      if (!idle_.empty()) {
        event = idle_.back();
        idle_.pop_back();
      }
    }
    if (event == nullptr) event = MakeEvent();
    return DeviceMoment(event, [all = shared_from_this()](DeviceEvent unused) {
      ps::MutexLock lock(&all->mu_);
      all->idle_.push_back(unused);
    });
  }

 private:
  ps::Mutex mu_;
  std::vector<DeviceEvent> idle_ PS_GUARDED_BY(mu_);
};

DeviceCopies* DeviceCopies::Of(int device) {
  static ps::Mutex mu;
  static auto* all = new std::map<int, std::unique_ptr<DeviceCopies>>();
  ps::MutexLock lock(&mu);
  auto& copies = (*all)[device];
  if (!copies) copies = std::make_unique<DeviceCopies>(device);
  return copies.get();
}

DeviceCopies::DeviceCopies(int device) : device_(device), events_(std::make_shared<Events>()) {
  const CurrentDevice current(device);
  for (const CopyLane lane :
       {CopyLane::kToHost, CopyLane::kFewToHost, CopyLane::kWholeToHost, CopyLane::kToDevice}) {
    lanes_[lane] = {MakeStream(), MakeStream()};
  }
}

DeviceMoment DeviceCopies::MomentOf(DeviceStream stream) {
  DeviceMoment moment = events_->Take();
  RecordEvent(moment.get(), stream);
  return moment;
}

DeviceMoment DeviceCopies::Now(DeviceStream stream) {
  const CurrentDevice current(device_);
  return NowIn(stream);
}

DeviceMoment DeviceCopies::NowIn(DeviceStream stream) {
  // An event that was just recorded is not done for some microseconds, even of an idle stream.
  return StreamIsIdle(stream) ? nullptr : MomentOf(stream);
}

bool DeviceCopies::IsDone(const DeviceMoment& moment) {
  return !moment || EventIsDone(moment.get());
}

void DeviceCopies::Check() {
  const CurrentDevice current(device_);
  (void)StreamIsIdle(lanes_.at(CopyLane::kToDevice).work);
}

DeviceStream DeviceCopies::CallsFor(DeviceStream stream) {
  ps::MutexLock lock(&mu_);
  const auto it = callers_.find(stream);
  if (it != callers_.end()) return it->second;
  const DeviceStream calls =
      callers_.size() < kMaxCallers
          ? MakeStream()
          : std::next(callers_.begin(), callers_.size() % kMaxCallers)->second;
  return callers_[stream] = calls;
}

void DeviceCopies::CallAfter(const DeviceMoment& moment, DeviceStream stream,
                             std::function<void()> then) {
  const CurrentDevice current(device_);
  const DeviceStream calls = CallsFor(stream);
  if (moment) WaitForEvent(calls, moment.get());
  CallWhenDone(calls, std::move(then));
}

DeviceMoment DeviceCopies::Enqueue(CopyLane lane, const std::vector<Copy>& copies) {
  const CurrentDevice current(device_);
  const DeviceStream stream = lanes_.at(lane).work;
  for (const Copy& copy : copies) {
    if (lane == CopyLane::kToDevice) {
      CopyToDevice(copy.to, copy.from, copy.bytes, stream);
    } else {
      CopyToHost(copy.to, copy.from, copy.bytes, stream);
    }
  }
  return MomentOf(stream);
}

void DeviceCopies::CallAfter(CopyLane lane, const DeviceMoment& copied,
                             std::function<void()> then) {
  const CurrentDevice current(device_);
  const DeviceStream calls = lanes_.at(lane).calls;
  WaitForEvent(calls, copied.get());
  CallWhenDone(calls, std::move(then));
}

bool DeviceCopies::AwaitOrCallAfter(CopyLane lane, const DeviceMoment& copied,
                                    std::function<void()> then) {
  const auto end = std::chrono::steady_clock::now() + kAwaited;
  do {
    if (IsDone(copied)) return true;
  } while (std::chrono::steady_clock::now() < end);
  PS_PROBE(kCopyCalled);
  CallAfter(lane, copied, std::move(then));
  return false;
}

DeviceMoment DeviceCopies::CopiedToDevice() {
  const CurrentDevice current(device_);
  return NowIn(lanes_.at(CopyLane::kToDevice).work);
}

void DeviceCopies::MakeWait(DeviceStream stream, const DeviceMoment& moment) {
  if (!moment) return;
  const CurrentDevice current(device_);
  WaitForEvent(stream, moment.get());
}

void DeviceCopies::MakeWait(CopyLane lane, const DeviceMoment& moment) {
  MakeWait(lanes_.at(lane).work, moment);
}

DeviceMoment DeviceCopies::CopyIn(DeviceStream stream, const std::vector<Copy>& copies) {
  const CurrentDevice current(device_);
  for (const Copy& copy : copies) CopyToDevice(copy.to, copy.from, copy.bytes, stream);
  return MomentOf(stream);
}

void DeviceCopies::CopyOnceSet(DeviceStream stream, const DeviceWord* word,
                               const std::vector<Copy>& copies) {
  const CurrentDevice current(device_);
  WaitForWord(stream, word);
  for (const Copy& copy : copies) CopyToDevice(copy.to, copy.from, copy.bytes, stream);
}

namespace {

// Of one turn: its first copy waits for the last, no longer than this takes, 20 to 40 us.  A longer
// one goes by itself, and is not awaited.
constexpr size_t kMostBytes = 1 << 20;

}  // namespace

void CopyQueue::Turn::CallDone() const {
  for (const Entry& entry : entries) entry.done();
}

void CopyQueue::Add(Entry entry) {
  {
    ps::MutexLock lock(&mu_);
    waiting_.push_back(std::move(entry));
    if (taken_) return PS_PROBE(kCopyLeft);
    taken_ = true;
  }
  for (Turn turn; TakeTurn(&turn); turn = Turn()) Give(std::move(turn));
}

bool CopyQueue::Leave(Entry* entry) {
  ps::MutexLock lock(&mu_);
  if (!taken_) return false;
  PS_PROBE(kCopyLeft);
  waiting_.push_back(std::move(*entry));
  return true;
}

bool CopyQueue::TakeTurn(Turn* turn) {
  ps::MutexLock lock(&mu_);
  BPS_INVARIANT_NOTED("one thread at a time gives copies", taken_, "nobody had begun to");
  while (!waiting_.empty()) {
    const size_t bytes = waiting_.front().copy.bytes;
    if (!turn->entries.empty() && turn->bytes + bytes > kMostBytes) break;
    turn->bytes += bytes;
    turn->entries.splice(turn->entries.end(), waiting_, waiting_.begin());
  }
  taken_ = !turn->entries.empty();
  return taken_;
}

void CopyQueue::Give(Turn turn) noexcept {
  // Made before it is needed.
  static const std::string kNoMemory =
      "this process is out of memory: it cannot copy between a GPU and memory";
  std::shared_ptr<Turn> given;
  std::string failure;
  const std::string* error = &failure;
  try {
    given = std::make_shared<Turn>();
    std::swap(*given, turn);
    AwaitOrCall(given);
  } catch (const std::bad_alloc&) {
    error = &kNoMemory;
  } catch (const std::exception& e) {
    failure = e.what();
  }
  for (const Entry& entry : given ? given->entries : turn.entries) TellBegun(entry, *error);
}

void CopyQueue::TellBegun(const Entry& entry, const std::string& error) {
  try {
    entry.begun(error);
  } catch (const std::exception& e) {
    BPS_LOG(ERROR) << "a copy between a GPU and memory: " << e.what();
  }
}

void CopyQueue::AwaitOrCall(const std::shared_ptr<const Turn>& turn) {
  std::vector<Copy> copies;
  for (const Entry& entry : turn->entries) copies.push_back(entry.copy);
  DeviceCopies* const device = DeviceCopies::Of(device_);
  const DeviceMoment copied = device->Enqueue(lane_, copies);
  const auto done = [turn] { turn->CallDone(); };
  if (turn->bytes > kMostBytes) return device->CallAfter(lane_, copied, done);
  if (device->AwaitOrCallAfter(lane_, copied, done)) done();
}

CopyQueue* CopyQueues::Of(int device, CopyLane lane) {
  ps::MutexLock lock(&mu_);
  auto& queue = queues_[{device, lane}];
  if (!queue) queue = std::make_unique<CopyQueue>(device, lane);
  return queue.get();
}

namespace {

constexpr uint64_t kSmallestBlock = 4096;
constexpr uint64_t kLargestSlab = 64 << 20;

uint64_t PowerOfTwo(uint64_t at_least) {
  uint64_t size = kSmallestBlock;
  while (size < at_least) size *= 2;
  return size;
}

}  // namespace

void Keep(const PinnedBlock& block) {
  static ps::Mutex mu;
  static auto* kept = new std::vector<PinnedBlock>();
  ps::MutexLock lock(&mu);
  kept->push_back(block);
}

class PinnedPool::Pools {
 public:
  PinnedPool* Of(Use use, uint64_t limit, uint64_t largest) {
    ps::MutexLock lock(&mu_);
    auto& pool = pools_[{use, PowerOfTwo(largest)}];
    if (!pool) {
      pool = std::make_unique<PinnedPool>(limit, largest, [](size_t bytes) {
        void* memory = PinMemory(bytes);
        ps::RegistrationCache::Add(memory, bytes);  // a transport may register it once
        return memory;
      });
    }
    pool->SetLimit(limit);
    return pool.get();
  }

 private:
  ps::Mutex mu_;
  // By use and top_.
  std::map<std::pair<Use, uint64_t>, std::unique_ptr<PinnedPool>> pools_ PS_GUARDED_BY(mu_);
};

PinnedPool::PinnedPool(uint64_t limit, uint64_t largest, Allocate allocate)
    : top_(PowerOfTwo(largest)), allocate_(std::move(allocate)), limit_(limit) {}

PinnedPool* PinnedPool::Shared(Use use, uint64_t limit, uint64_t largest) {
  static auto* pools = new Pools;
  return pools->Of(use, limit, largest);
}

void PinnedPool::SetLimit(uint64_t limit) {
  ps::MutexLock lock(&grow_mu_);
  limit_ = limit;
  wanted_ = 0;
}

uint64_t PinnedPool::Growth(uint64_t wanted, uint64_t limit) {
  const uint64_t pinned = pinned_bytes();
  const uint64_t target = std::min((wanted + top_ - 1) / top_ * top_, limit / top_ * top_);
  if (target <= pinned) return 0;
  return std::min(target - pinned, std::max(kLargestSlab / top_ * top_, top_));
}

void PinnedPool::Reserve(uint64_t bytes) {
  {
    ps::MutexLock growing(&grow_mu_);
    wanted_ += bytes;
    while (const uint64_t size = Growth(wanted_, std::max(limit_, top_))) Grow(size);
  }
  ServeWaiters();
}

void PinnedPool::Grow(uint64_t bytes) {
  char* slab = static_cast<char*>(allocate_(bytes));
  ps::MutexLock lock(&mu_);
  slabs_[slab] = bytes;
  pinned_ += bytes;
  for (uint64_t at = 0; at < bytes; at += top_) free_[top_].insert(slab + at);
}

PinnedBlock PinnedPool::TakeOrPin(uint64_t bytes, uint64_t more) {
  if (PinnedBlock block = TryTake(bytes)) return block;
  ps::MutexLock growing(&grow_mu_);
  if (const uint64_t size = Growth(pinned_bytes() + std::max(bytes, more), limit_)) Grow(size);
  return TryTake(bytes);
}

uint64_t PinnedPool::SizeFor(uint64_t bytes) const { return std::min(PowerOfTwo(bytes), top_); }

char* PinnedPool::Cut(uint64_t size) {
  // The smallest free block that is large enough.
  auto it = free_.lower_bound(size);
  while (it != free_.end() && it->second.empty()) ++it;
  if (it == free_.end()) return nullptr;
  uint64_t have = it->first;
  char* data = *it->second.begin();
  it->second.erase(it->second.begin());
  while (have > size) {
    have /= 2;
    free_[have].insert(data + have);
  }
  in_use_ += size;
  BPS_INVARIANT_NOTED(
      "no more is in use than there is", in_use_ <= pinned_,
      std::to_string(in_use_) + " bytes of " + std::to_string(pinned_) + " pinned ones");
  return data;
}

void PinnedPool::PutBack(char* data, uint64_t size) {
  const auto free = free_.find(size);
  const bool is_out = in_use_ >= size && (free == free_.end() || free->second.count(data) == 0);
  BPS_INVARIANT_NOTED("a block is returned once", is_out,
                      "a pinned block of " + std::to_string(size) + " bytes came back, with " +
                          std::to_string(in_use_) + " bytes in use");
  if (!is_out) return;
  in_use_ -= size;
  char* const slab = std::prev(slabs_.upper_bound(data))->first;
  while (size < top_) {
    char* const other = slab + ((data - slab) ^ size);
    if (free_[size].erase(other) == 0) break;
    data = std::min(data, other);
    size *= 2;
  }
  free_[size].insert(data);
}

PinnedBlock PinnedPool::Wrap(char* data, uint64_t size) {
  return PinnedBlock(data, [this, size](char* block) { Return(block, size); });
}

PinnedBlock PinnedPool::TryTake(uint64_t bytes) {
  const uint64_t size = SizeFor(bytes);
  char* data = nullptr;
  {
    ps::MutexLock lock(&mu_);
    data = Cut(size);
  }
  return data == nullptr ? nullptr : Wrap(data, size);
}

PinnedBlock PinnedPool::TakeOrCall(uint64_t bytes, Then then) {
  const uint64_t size = SizeFor(bytes);
  char* data = nullptr;
  {
    ps::MutexLock lock(&mu_);
    if (waiters_.empty()) data = Cut(size);
    if (data == nullptr) waiters_.push_back({size, std::move(then)});
  }
  return data == nullptr ? nullptr : Wrap(data, size);
}

void PinnedPool::Return(char* data, uint64_t size) {
  {
    ps::MutexLock lock(&mu_);
    PutBack(data, size);
  }
  ServeWaiters();
}

void PinnedPool::ServeWaiters() {
  ps::MutexLock lock(&mu_);
  // One thread at a time, which takes another look after each call: so a call that gives its
  // block back at once, or many of them, do not call each other ever deeper.
  if (serving_) return;
  serving_ = true;
  bool again = false;
  while (!waiters_.empty()) {
    char* data = Cut(waiters_.front().size);
    if (data == nullptr) break;
    Waiter waiter = std::move(waiters_.front());
    waiters_.pop_front();
    lock.Unlock();
    if (std::exchange(again, true)) PS_PROBE(kPoolShared);
    waiter.then(Wrap(data, waiter.size));
    waiter = Waiter();
    lock.Lock();
  }
  serving_ = false;
}

uint64_t PinnedPool::pinned_bytes() {
  ps::MutexLock lock(&mu_);
  return pinned_;
}

uint64_t PinnedPool::bytes_in_use() {
  ps::MutexLock lock(&mu_);
  return in_use_;
}

}  // namespace core
}  // namespace byteps
