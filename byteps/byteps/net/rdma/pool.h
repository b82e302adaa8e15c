// Pool of registered memory; and the memory from which messages are sent, and into which they are
// received.
#ifndef BYTEPS_NET_RDMA_POOL_H_
#define BYTEPS_NET_RDMA_POOL_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/net/link/idle_blocks.h"
#include "byteps/net/rdma/device.h"
#include "byteps/net/rdma/queues.h"
#include "byteps/net/rdma/region.h"
#include "byteps/net/rdma/registrar.h"
#include "ps/sarray.h"

namespace ps {
namespace rdma {

// Thread-safe.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  struct Buffer {
    SArray<char> bytes;  // returns to the pool when the last copy is destroyed
    const Region* region = nullptr;
  };

  // Keeps at most `max_idle` bytes of unused memory; the registrar frees the rest.
  Pool(Devices devices, std::shared_ptr<Registrar> registrar, size_t max_idle)
      : devices_(std::move(devices)), registrar_(std::move(registrar)), idle_(max_idle) {}

  // Returns exactly `bytes` uninitialised bytes. Blocks if memory must be registered. Buffers may
  // outlive the pool. Throws Error on failure.
  Buffer Take(size_t bytes);
  // Sets `buffer` to unused memory of the pool, without blocking. Returns false if there is none.
  bool TakeIdle(size_t bytes, Buffer* buffer);

  // Returns the region of the buffer that contains all of this memory, or null.
  const Region* Find(const void* address, size_t bytes);

 private:
  struct Block {
    Block(const Devices& devices, size_t size);
    ~Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    const size_t size;
    char* const memory;
    std::unique_ptr<Region> region;  // destroyed before the memory
    bool is_out = false;             // whether a message uses the block
  };

  // Rounds up to one of four sizes per power of two, so that at most a fifth of a block is wasted.
  static size_t ClassOf(size_t bytes);
  Buffer BufferOf(Block* block, size_t bytes);
  void Return(Block* block);

  const Devices devices_;
  const std::shared_ptr<Registrar> registrar_;
  Mutex mu_;
  std::map<uintptr_t, std::unique_ptr<Block>> blocks_ PS_GUARDED_BY(mu_);  // by address
  IdleBlocks<Block*> idle_ PS_GUARDED_BY(mu_);
};

// Prepares a message for sending. Values that do not fit in its frame are sent from their own
// memory, which is in the pool, in the registration cache, or registered for this message. Small or
// scattered values are copied, which is cheaper. Throws Error if memory cannot be registered.
OutgoingPtr MakeOutgoing(std::string meta, std::vector<SArray<char>> values, uint64_t key,
                         uint32_t inline_bytes, uint32_t slot_bytes, const Devices& devices,
                         Pool* pool);

// Returns the registration of memory to receive into. Without `may_block`, neither registers memory
// nor waits. Returns null if the memory is not registered, or if registering has failed.
std::shared_ptr<Region> RegionToReceive(const void* address, uint64_t bytes, bool may_block,
                                        const Devices& devices);

// Splits `region`, from `offset` on, into values of these sizes.
std::vector<SArray<char>> Split(const SArray<char>& region, uint64_t offset,
                                const std::vector<uint64_t>& sizes);

}  // namespace rdma
}  // namespace ps

#endif  // BYTEPS_NET_RDMA_POOL_H_
