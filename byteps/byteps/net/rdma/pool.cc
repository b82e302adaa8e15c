#include "byteps/net/rdma/pool.h"

#include <cerrno>
#include <cstdlib>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/net/rdma/wire.h"

namespace ps {
namespace rdma {
namespace {

constexpr size_t kPage = 4096;

char* AllocatePages(size_t bytes) {
  auto* memory = static_cast<char*>(aligned_alloc(kPage, bytes));
  if (memory == nullptr) Throw("cannot allocate " + std::to_string(bytes) + " bytes", ENOMEM);
  return memory;
}

}  // namespace

Pool::Block::Block(const Devices& devices, size_t size) : size(size), memory(AllocatePages(size)) {
  try {
    region = std::make_unique<Region>(devices, memory, size, kValueAccess);
  } catch (...) {
    free(memory);
    throw;
  }
}

Pool::Block::~Block() {
  region.reset();
  free(memory);
}

size_t Pool::ClassOf(size_t bytes) {
  size_t power = kPage;
  while (power * 2 <= bytes) power *= 2;
  return AlignUp(bytes < kPage ? kPage : bytes, power / 4 < kPage ? kPage : power / 4);
}

bool Pool::TakeIdle(size_t bytes, Buffer* buffer) {
  const size_t size = ClassOf(bytes);
  Block* block = nullptr;
  {
    MutexLock lock(&mu_);
    if (!idle_.Take(size, &block)) return false;
  }
  *buffer = BufferOf(block, bytes);
  return true;
}

Pool::Buffer Pool::Take(size_t bytes) {
  Buffer buffer;
  if (TakeIdle(bytes, &buffer)) return buffer;
  // Without the lock: pinning pages takes long.
  auto made = std::make_unique<Block>(devices_, ClassOf(bytes));
  Block* const block = made.get();
  {
    MutexLock lock(&mu_);
    blocks_[reinterpret_cast<uintptr_t>(block->memory)] = std::move(made);
  }
  return BufferOf(block, bytes);
}

Pool::Buffer Pool::BufferOf(Block* block, size_t bytes) {
  Buffer buffer;
  buffer.region = block->region.get();
  block->is_out = true;  // it is the caller's alone
  auto self = shared_from_this();
  buffer.bytes.reset(block->memory, bytes, [self, block](char*) { self->Return(block); });
  return buffer;
}

const Region* Pool::Find(const void* address, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  MutexLock lock(&mu_);
  auto after = blocks_.upper_bound(begin);
  if (after == blocks_.begin()) return nullptr;
  const Block& block = *std::prev(after)->second;
  const auto offset = begin - reinterpret_cast<uintptr_t>(block.memory);
  if (offset > block.size || bytes > block.size - offset) return nullptr;
  return block.region.get();
}

void Pool::Return(Block* block) {
  std::shared_ptr<Block> surplus;
  {
    MutexLock lock(&mu_);
    BPS_INVARIANT_NOTED("a block is returned once", block->is_out,
                        "one of " + std::to_string(block->size) + " bytes was there already");
    if (!std::exchange(block->is_out, false)) return;
    if (idle_.Keep(block->size, block)) return;
    auto it = blocks_.find(reinterpret_cast<uintptr_t>(block->memory));
    surplus = std::move(it->second);
    blocks_.erase(it);
  }
  // It goes with the task, in the registrar's thread as long as there is one.
  registrar_->Post([held = std::move(surplus)] {});
}

}  // namespace rdma
}  // namespace ps
