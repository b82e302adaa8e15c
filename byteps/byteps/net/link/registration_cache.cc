#include "byteps/net/link/registration_cache.h"

#include <atomic>
#include <iterator>
#include <map>
#include <vector>

#include "byteps/base/mutex.h"

namespace ps {
namespace {

struct Allocation {
  uint64_t number = 0;
  uintptr_t begin = 0;
  size_t bytes = 0;
  // Each allocation has a lock: registering takes long, and must not block other allocations.
  Mutex mu;
  RegistrationCache::Registration registration PS_GUARDED_BY(mu);
  bool tried PS_GUARDED_BY(mu) = false;
};
using AllocationPtr = std::shared_ptr<Allocation>;

// The lock and the map are never destroyed, because memory may be freed while the process ends.
Mutex* const mu = new Mutex();
// Allocations by address. No two of them overlap.
auto* const allocations PS_PT_GUARDED_BY(mu) = new std::map<uintptr_t, AllocationPtr>();
uint64_t last_number PS_GUARDED_BY(mu) = 0;

std::atomic<uint64_t> registrations{0};

// Returns the first allocation that ends after `address`.
std::map<uintptr_t, AllocationPtr>::iterator FirstBeyond(uintptr_t address) PS_REQUIRES(mu) {
  auto it = allocations->upper_bound(address);
  if (it == allocations->begin()) return it;
  auto before = std::prev(it);
  return before->first + before->second->bytes > address ? before : it;
}

}  // namespace

uint64_t RegistrationCache::Add(const void* address, size_t bytes) {
  auto added = std::make_shared<Allocation>();
  added->begin = reinterpret_cast<uintptr_t>(address);
  added->bytes = bytes;
  std::vector<AllocationPtr> forgotten;  // deregistered without the lock
  MutexLock lock(mu);
  added->number = ++last_number;
  if (bytes == 0) return added->number;
  auto it = FirstBeyond(added->begin);
  while (it != allocations->end() && it->first < added->begin + bytes) {
    forgotten.push_back(std::move(it->second));
    it = allocations->erase(it);
  }
  (*allocations)[added->begin] = added;
  return added->number;
}

void RegistrationCache::Remove(uint64_t number) {
  AllocationPtr removed;
  MutexLock lock(mu);
  for (auto it = allocations->begin(); it != allocations->end(); ++it) {
    if (it->second->number != number) continue;
    removed = std::move(it->second);
    allocations->erase(it);
    return;
  }
}

RegistrationCache::Registration RegistrationCache::Find(const void* address, size_t bytes,
                                                        const Register& make) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  AllocationPtr allocation;
  {
    MutexLock lock(mu);
    const auto it = FirstBeyond(begin);
    if (it == allocations->end() || it->first > begin) return nullptr;
    allocation = it->second;
  }
  const size_t offset = begin - allocation->begin;
  if (bytes > allocation->bytes - offset) return nullptr;
  if (!make) {
    // The lock's holder may be registering, which takes long.
    if (!allocation->mu.TryLock()) return nullptr;
    const Registration registration = allocation->registration;
    allocation->mu.Unlock();
    return registration;
  }
  MutexLock lock(&allocation->mu);
  if (!allocation->tried) {
    allocation->tried = true;
    allocation->registration =
        make(reinterpret_cast<const void*>(allocation->begin), allocation->bytes);
  }
  return allocation->registration;
}

void RegistrationCache::ForgetRegistrations() {
  std::vector<AllocationPtr> all;
  {
    MutexLock lock(mu);
    for (const auto& entry : *allocations) all.push_back(entry.second);
  }
  for (const auto& allocation : all) {
    MutexLock lock(&allocation->mu);
    allocation->registration.reset();
    allocation->tried = false;
  }
}

uint64_t RegistrationCache::Registrations() { return registrations; }
void RegistrationCache::CountRegistration() { ++registrations; }

}  // namespace ps
