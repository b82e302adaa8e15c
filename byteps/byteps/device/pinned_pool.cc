#include "byteps/device/pinned_pool.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/device/device.h"
#include "byteps/net/link/registration_cache.h"

namespace byteps {
namespace core {
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
  static auto* kept_blocks = new std::vector<PinnedBlock>();
  ps::MutexLock lock(&mu);
  kept_blocks->push_back(block);
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
  // Pools by their use and by their limit, `top_`.
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
  // Takes the smallest free block that is large enough.
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
  // One thread at a time serves waiting callers, and looks for more after each call. So a callback
  // that returns its block at once does not cause nested calls.
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
