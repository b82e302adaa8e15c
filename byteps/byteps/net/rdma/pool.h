// Registered memory: the thread that registers it, the pool that uses it again, and the parts of
// messages that lie in it.
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

// Any thread may call anything.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  struct Buffer {
    SArray<char> bytes;  // gives the memory back when its last copy goes
    const Region* region = nullptr;
  };

  // Keeps at most `max_idle` bytes that nobody uses; more is let go of by the registrar.
  Pool(Devices devices, std::shared_ptr<Registrar> registrar, size_t max_idle)
      : devices_(std::move(devices)), registrar_(std::move(registrar)), idle_(max_idle) {}

  // Exactly `bytes` bytes, uninitialised.  Throws Error when they cannot be had.
  // What it hands out may outlive everything but the process.  Blocks while memory is
  // registered.
  Buffer Take(size_t bytes);
  // The same of memory that is there already; false if there is none.  Never blocks.
  bool TakeIdle(size_t bytes, Buffer* buffer);

  // Where all of this memory is in one buffer that was taken, that one's region, else null.
  const Region* Find(const void* address, size_t bytes);

 private:
  struct Block {
    Block(const Devices& devices, size_t size);
    ~Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    const size_t size;
    char* const memory;
    std::unique_ptr<Region> region;  // goes before the memory does
    bool is_out = false;             // somebody has it
  };

  // Four sizes between each power of two and the next: a fifth is wasted at worst.
  static size_t ClassOf(size_t bytes);
  Buffer BufferOf(Block* block, size_t bytes);
  void Return(Block* block);

  const Devices devices_;
  const std::shared_ptr<Registrar> registrar_;
  Mutex mu_;
  std::map<uintptr_t, std::unique_ptr<Block>> blocks_ PS_GUARDED_BY(mu_);  // by address
  IdleBlocks<Block*> idle_ PS_GUARDED_BY(mu_);
};

// The memory of messages: where a device reads and writes their values.

// Values that are not sent with the message are sent from where they lie: out of the pool,
// out of lasting memory, or registered for as long as it takes.  Small or scattered ones
// are copied, which is cheaper.  Throws Error when memory cannot be registered.
OutgoingPtr MakeOutgoing(std::string meta, std::vector<SArray<char>> values, uint64_t key,
                         uint32_t inline_bytes, uint32_t slot_bytes, const Devices& devices,
                         Pool* pool);

// The registration of memory for receiving.  `may_block`: it is made if there is none yet,
// and otherwise not waited for.  Null: there is none, or it cannot be had.
std::shared_ptr<Region> RegionToReceive(const void* address, uint64_t bytes, bool may_block,
                                        const Devices& devices);

// Cuts `region` into values of these sizes, from `offset` on.
std::vector<SArray<char>> Split(const SArray<char>& region, uint64_t offset,
                                const std::vector<uint64_t>& sizes);

}  // namespace rdma
}  // namespace ps

#endif  // BYTEPS_NET_RDMA_POOL_H_
