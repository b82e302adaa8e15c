// Registered memory, used again instead of being registered anew.
#ifndef BYTEPS_NET_RDMA_POOL_H_
#define BYTEPS_NET_RDMA_POOL_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "byteps/base/mutex.h"
#include "byteps/net/link/idle_blocks.h"
#include "byteps/net/rdma/registrar.h"
#include "byteps/net/rdma/verbs.h"
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

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_POOL_H_
