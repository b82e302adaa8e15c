#include "byteps/net/tcp/memory_pool.h"

#include <cstdlib>
#include <new>
#include <string>

#include "byteps/base/invariant.h"

namespace ps {
namespace tcp {
namespace {

constexpr size_t kPage = 4096;

}  // namespace

MemoryPool::~MemoryPool() {
  for (char* block : idle_.TakeAll()) free(block);
}

size_t MemoryPool::Rounded(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

SArray<char> MemoryPool::Take(size_t bytes) {
  const size_t size = Rounded(bytes);
  char* block = nullptr;
  {
    MutexLock lock(&mu_);
    ++out_;
    idle_.Take(size, &block);
  }
  if (block == nullptr) block = static_cast<char*>(aligned_alloc(kPage, size));
  if (block == nullptr) {
    MutexLock lock(&mu_);
    --out_;
    throw std::bad_alloc();
  }
  SArray<char> values;
  // The deleter keeps the pool alive, because values may outlive the connections.
  values.reset(block, bytes,
               [self = shared_from_this(), size](char* memory) { self->Return(memory, size); });
  return values;
}

void MemoryPool::Return(char* block, size_t size) {
  {
    MutexLock lock(&mu_);
    BPS_INVARIANT_NOTED("a block is returned once", out_ > 0,
                        "one of " + std::to_string(size) + " bytes, while all were there");
    out_ -= out_ > 0 ? 1 : 0;
    if (idle_.Keep(size, block)) return;
  }
  free(block);
}

}  // namespace tcp
}  // namespace ps
