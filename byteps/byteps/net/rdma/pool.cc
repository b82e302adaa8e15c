#include "byteps/net/rdma/pool.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/link/registration_cache.h"
#include "byteps/net/rdma/verbs.h"
#include "byteps/net/rdma/wire.h"
#include "ps/internal/postoffice.h"
#include "ps/sarray.h"

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
  // The lock is not held here, because pinning pages takes long.
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
  block->is_out = true;  // only the caller knows this block
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
  // The task frees the memory: in the registrar's thread, or here if that thread has ended.
  registrar_->Post([held = std::move(surplus)] {});
}

namespace {

// Limit below which copying is cheaper than pinning and unpinning pages.
constexpr uint64_t kCopyBytes = 32 << 10;

void CopyToPool(Outgoing* out, Pool* pool) {
  const uint64_t before = out->meta_in_region ? AlignUp(out->meta.size(), kRegionAlign) : 0;
  Pool::Buffer buffer = pool->Take(before + out->value_bytes);
  char* target = buffer.bytes.data();
  if (out->meta_in_region) memcpy(target, out->meta.data(), out->meta.size());
  target += before;
  for (const auto& value : out->values) {
    if (value.size() == 0) continue;
    memcpy(target, value.data(), value.size());
    target += value.size();
  }
  out->values.clear();  // the values were copied, so they need not be kept until they are sent
  out->copy = buffer.bytes;
  out->address = out->copy.data();
  out->length = out->copy.size();
  out->keys = buffer.region;
}

// Registers memory for sending. Memory that is not read-only is registered for receiving, too,
// because later messages are often received into it.
RegistrationCache::Registration RegisterAll(const Devices& devices, const void* begin,
                                            size_t bytes) {
  try {
    return std::make_shared<Region>(devices, begin, bytes, kValueAccess);
  } catch (const Error&) {  // it may be read-only memory
  }
  try {
    return std::make_shared<Region>(devices, begin, bytes, 0);
  } catch (const Error& e) {
    BPS_LOG(WARNING) << e.what() << "; now each message registers its own part of it";
    return nullptr;
  }
}

// Returns null if the memory is not in the cache, or too large to register at once.
std::shared_ptr<Region> CachedRegion(const void* address, uint64_t bytes, bool may_block,
                                     const Devices& devices) {
  RegistrationCache::Register make;
  if (may_block) {
    make = [&devices](const void* begin, size_t size) { return RegisterAll(devices, begin, size); };
  }
  return std::static_pointer_cast<Region>(RegistrationCache::Find(address, bytes, make));
}

}  // namespace

OutgoingPtr MakeOutgoing(std::string meta, std::vector<SArray<char>> values, uint64_t key,
                         uint32_t inline_bytes, uint32_t slot_bytes, const Devices& devices,
                         Pool* pool) {
  auto out = std::make_unique<Outgoing>();
  out->meta = std::move(meta);
  out->values = std::move(values);
  out->key = key;
  for (const auto& value : out->values) {
    out->sizes.push_back(value.size());
    out->value_bytes += value.size();
  }

  if (out->value_bytes > kMaxValueBytes || out->values.size() > kMaxValues) {
    throw Error(out->Describe() +
                ", is larger than any that a peer takes: " + std::to_string(kMaxValueBytes) +
                " bytes in " + std::to_string(kMaxValues) + " values");
  }
  const uint64_t head = kFrameHeaderBytes + out->values.size() * sizeof(uint64_t) + kOfferBytes;
  const bool small = out->value_bytes <= inline_bytes;
  if (small && head + out->meta.size() + out->value_bytes <= slot_bytes) return out;
  out->in_region = true;
  out->meta_in_region = head + out->meta.size() > slot_bytes;
  if (out->values.size() != 1 || out->meta_in_region) {
    CopyToPool(out.get(), pool);
    return out;
  }
  const SArray<char>& value = out->values[0];
  out->address = value.data();
  out->length = value.size();
  out->keys = pool->Find(out->address, out->length);
  if (out->keys != nullptr) return out;
  if (out->length <= kCopyBytes) {
    CopyToPool(out.get(), pool);
    return out;
  }
  out->region = CachedRegion(out->address, out->length, true, devices);
  if (!out->region) out->region = std::make_shared<Region>(devices, out->address, out->length, 0);
  out->keys = out->region.get();
  return out;
}

std::shared_ptr<Region> RegionToReceive(const void* address, uint64_t bytes, bool may_block,
                                        const Devices& devices) {
  auto region = CachedRegion(address, bytes, may_block, devices);
  if (region) return region->writable() ? region : nullptr;
  if (!may_block || bytes <= kCopyBytes) return nullptr;
  try {
    return std::make_shared<Region>(devices, address, bytes, kValueAccess);
  } catch (const Error& e) {
    PS_VLOG(1) << e.what() << "; the value is received elsewhere and copied";
    return nullptr;
  }
}

std::vector<SArray<char>> Split(const SArray<char>& region, uint64_t offset,
                                const std::vector<uint64_t>& sizes) {
  std::vector<SArray<char>> values;
  for (const uint64_t size : sizes) {
    values.push_back(region.segment(offset, offset + size));
    offset += size;
  }
  return values;
}

}  // namespace rdma
}  // namespace ps
