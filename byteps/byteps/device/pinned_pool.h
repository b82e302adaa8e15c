#ifndef BYTEPS_DEVICE_PINNED_POOL_H_
#define BYTEPS_DEVICE_PINNED_POOL_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>

#include "byteps/base/mutex.h"

namespace byteps {
namespace core {

// Bounded pool of pinned host memory for the partitions of GPU tensors.
//
// Blocks are powers of two, cut from slabs by halving. Slabs are pinned when tensors are declared,
// outside of locks that all-reduces need, because pinning takes long. Slabs stay until the process
// ends, because unpinning waits for all of the GPU's work, which may never end after a peer was
// lost.
//
// No function waits for a block. If none is free, the pool calls the caller back later. So no
// thread that returns blocks is ever blocked. Every block is returned eventually: a partition holds
// it only while its values are copied and sent, or received and copied, and none of this waits for
// another block, a server's window or another worker. A push returns its block before its answer
// comes. An answer without a block is received elsewhere.

// Block of the pool. It returns to the pool when its last copy is destroyed, in any thread.
using PinnedBlock = std::shared_ptr<char>;

// Keeps the block out of the pool for ever, because a failed device may still copy to or from it.
void Keep(const PinnedBlock& block);

// Thread-safe.
class PinnedPool {
 public:
  using Allocate = std::function<void*(size_t)>;
  using Then = std::function<void(PinnedBlock)>;

  // Pins at most `limit` bytes, but at least a block of `largest` bytes. `allocate` may throw.
  PinnedPool(uint64_t limit, uint64_t largest, Allocate allocate);
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  // Use of a pool. Each use has its own memory: an all-reduce holds its blocks while it waits for
  // other workers, which may wait for a partition of this worker.
  enum class Use {
    kPartitions,
    kStreamedSums,
    kSmallSums,
  };

  // Returns this process's pool for this use and blocks of up to `largest` bytes. The latest call
  // sets its limit; memory already pinned stays.
  static PinnedPool* Shared(Use use, uint64_t limit, uint64_t largest);

  // Makes room for `bytes` more bytes in flight, as far as the limit allows.
  void Reserve(uint64_t bytes);

  // Returns a block of at least `bytes` bytes (at most `largest`), or null if all are in use.
  PinnedBlock TryTake(uint64_t bytes);
  // Returns a block. If all are in use, first pins memory for `more` bytes, as far as the limit
  // allows. A device must be current.
  PinnedBlock TakeOrPin(uint64_t bytes, uint64_t more);
  // Returns a block, unless other callers wait for one. After returning null, calls `then` with a
  // block, in the thread that next returns one. `then` must not block.
  PinnedBlock TakeOrCall(uint64_t bytes, Then then);

  // Returns the size of the block for this many bytes: a power of two.
  uint64_t SizeFor(uint64_t bytes) const;
  uint64_t largest() const { return top_; }
  uint64_t pinned_bytes();
  uint64_t bytes_in_use();

 private:
  class Pools;
  struct Waiter {
    uint64_t size;
    Then then;
  };

  // Returns the size of the next slab. 0: there is enough memory, or the limit is reached.
  uint64_t Growth(uint64_t wanted, uint64_t limit) PS_REQUIRES(grow_mu_);
  void Grow(uint64_t bytes) PS_REQUIRES(grow_mu_);
  void SetLimit(uint64_t limit);
  char* Cut(uint64_t size) PS_REQUIRES(mu_);  // Cuts off a block. Returns null if there is none.
  // Merges the block with its free other half.
  void PutBack(char* data, uint64_t size) PS_REQUIRES(mu_);
  void Return(char* data, uint64_t size);
  // Calls waiting callers while there are blocks for them.
  void ServeWaiters();
  PinnedBlock Wrap(char* data, uint64_t size);

  const uint64_t top_;  // size of the largest block
  const Allocate allocate_;

  ps::Mutex grow_mu_;  // held while a slab is pinned
  uint64_t limit_ PS_GUARDED_BY(grow_mu_);
  uint64_t wanted_ PS_GUARDED_BY(grow_mu_) = 0;

  ps::Mutex mu_;
  std::map<char*, uint64_t> slabs_ PS_GUARDED_BY(mu_);           // with their sizes
  std::map<uint64_t, std::set<char*>> free_ PS_GUARDED_BY(mu_);  // by size
  std::deque<Waiter> waiters_ PS_GUARDED_BY(mu_);
  bool serving_ PS_GUARDED_BY(mu_) = false;  // a thread is in ServeWaiters
  uint64_t pinned_ PS_GUARDED_BY(mu_) = 0;
  uint64_t in_use_ PS_GUARDED_BY(mu_) = 0;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_DEVICE_PINNED_POOL_H_
