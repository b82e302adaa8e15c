#ifndef BYTEPS_NET_TCP_MEMORY_POOL_H_
#define BYTEPS_NET_TCP_MEMORY_POOL_H_

#include <sys/types.h>

#include <cstddef>
#include <memory>

#include "byteps/base/mutex.h"
#include "byteps/net/link/idle_blocks.h"
#include "ps/sarray.h"

namespace ps {
namespace tcp {

// Pool of memory for received values. Memory is reused, because the kernel needs as long to provide
// fresh pages as to receive into them.
class MemoryPool : public std::enable_shared_from_this<MemoryPool> {
 public:
  // Keeps at most `limit` bytes of unused memory.
  explicit MemoryPool(size_t limit) : idle_(limit) {}
  ~MemoryPool();

  // Returns `bytes` bytes, aligned to pages. They return to the pool when the last copy is
  // destroyed, in any thread. Throws std::bad_alloc.
  SArray<char> Take(size_t bytes);

 private:
  static size_t Rounded(size_t bytes);
  void Return(char* block, size_t size);

  Mutex mu_;
  IdleBlocks<char*> idle_ PS_GUARDED_BY(mu_);
  size_t out_ PS_GUARDED_BY(mu_) = 0;  // blocks in use
};

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_MEMORY_POOL_H_
