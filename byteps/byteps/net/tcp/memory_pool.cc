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
  for (auto& entry : free_) {
    for (char* block : entry.second) free(block);
  }
}

size_t MemoryPool::Rounded(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

SArray<char> MemoryPool::Take(size_t bytes) {
  const size_t size = Rounded(bytes);
  char* block = nullptr;
  {
    MutexLock lock(&mu_);
    ++out_;
    auto& blocks = free_[size];
    if (!blocks.empty()) {
      block = blocks.back();
      blocks.pop_back();
      PS_INVARIANT_NOTED("bytes kept are those of the blocks kept", free_bytes_ >= size,
                         std::to_string(free_bytes_) + " with a block of " + std::to_string(size));
      free_bytes_ -= size;
    }
  }
  if (block == nullptr) block = static_cast<char*>(aligned_alloc(kPage, size));
  if (block == nullptr) {
    MutexLock lock(&mu_);
    --out_;
    throw std::bad_alloc();
  }
  SArray<char> values;
  // Holds the pool: values may outlive the connections.
  values.reset(block, bytes,
               [self = shared_from_this(), size](char* memory) { self->Return(memory, size); });
  return values;
}

void MemoryPool::Return(char* block, size_t size) {
  {
    MutexLock lock(&mu_);
    PS_INVARIANT_NOTED("a block is returned once", out_ > 0,
                       "one of " + std::to_string(size) + " bytes, while all were there");
    out_ -= out_ > 0 ? 1 : 0;
    if (free_bytes_ + size <= limit_) {
      free_[size].push_back(block);
      free_bytes_ += size;
      return;
    }
  }
  free(block);
}

}  // namespace tcp
}  // namespace ps
