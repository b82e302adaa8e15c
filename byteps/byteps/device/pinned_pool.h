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

// Pinned host memory for the partitions of tensors on GPUs, bounded and used again and again.
//
// Blocks are powers of two, cut from slabs by halving.  Slabs are pinned when tensors are
// declared, outside of any lock that the sums need: pinning takes long.  They stay with the
// process: unpinning waits for all of the GPU's work, which may never end when a peer was lost.
//
// Nobody ever waits here.  Who finds no block is called when there is one, so that no thread is
// held up which others need to give their blocks back.  That cannot go on for ever either: a
// block is held while a partition is copied from the GPU and sent, or while its sum is received
// and copied to the GPU.  None of this waits for another block, for the window of a server, or
// for another worker: a push gives its block back before its answer comes, and an answer that
// finds no block is received elsewhere.

// Who drops the last copy gives it back; any thread may, also the driver's.
using PinnedBlock = std::shared_ptr<char>;

// Nobody gets this block again: a device that failed may have taken a copy, and still use it.
void Keep(const PinnedBlock& block);

// Any thread may call anything.
class PinnedPool {
 public:
  using Allocate = std::function<void*(size_t)>;
  using Then = std::function<void(PinnedBlock)>;

  // Of at most `limit` bytes, but at least one block of `largest` bytes.  `allocate` may throw.
  PinnedPool(uint64_t limit, uint64_t largest, Allocate allocate);
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  // Blocks of one use never come from what another one holds: a sum keeps its memory while it
  // waits for other workers, which may wait for a partition of this one.
  enum class Use {
    kPartitions,
    kStreamedSums,
    kSmallSums,
  };

  // This process's, for blocks of up to `largest` bytes.  The last caller sets its limit;
  // what is there already stays.
  static PinnedPool* Shared(Use use, uint64_t limit, uint64_t largest);

  // Makes room for `bytes` more bytes in flight, as far as the limit allows.
  void Reserve(uint64_t bytes);

  // A block of at least `bytes` (at most `largest`) bytes, or null: all are in use.
  PinnedBlock TryTake(uint64_t bytes);
  // As TryTake, but where all are in use pins memory for `more` bytes first, as far as the limit
  // allows.  Some device is current.
  PinnedBlock TakeOrPin(uint64_t bytes, uint64_t more);
  // As TryTake; but after those who wait already.  When it returns null, `then` will be called
  // with a block, by the thread that gives one back; it must not block.
  PinnedBlock TakeOrCall(uint64_t bytes, Then then);

  // Of the block that these calls take: a power of two.
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

  // Bytes of the next slab; 0: there is as much as is wanted, or as the limit allows.
  uint64_t Growth(uint64_t wanted, uint64_t limit) PS_REQUIRES(grow_mu_);
  void Grow(uint64_t bytes) PS_REQUIRES(grow_mu_);
  void SetLimit(uint64_t limit);
  char* Cut(uint64_t size) PS_REQUIRES(mu_);  // null: there is none
  // Joins it with its free other half.
  void PutBack(char* data, uint64_t size) PS_REQUIRES(mu_);
  void Return(char* data, uint64_t size);
  // Calls those who wait, as long as there are blocks for them.
  void ServeWaiters();
  PinnedBlock Wrap(char* data, uint64_t size);

  const uint64_t top_;  // bytes of the largest block
  const Allocate allocate_;

  ps::Mutex grow_mu_;  // while a slab is pinned
  uint64_t limit_ PS_GUARDED_BY(grow_mu_);
  uint64_t wanted_ PS_GUARDED_BY(grow_mu_) = 0;

  ps::Mutex mu_;
  std::map<char*, uint64_t> slabs_ PS_GUARDED_BY(mu_);           // and their bytes
  std::map<uint64_t, std::set<char*>> free_ PS_GUARDED_BY(mu_);  // by size
  std::deque<Waiter> waiters_ PS_GUARDED_BY(mu_);
  bool serving_ PS_GUARDED_BY(mu_) = false;  // a thread is in ServeWaiters
  uint64_t pinned_ PS_GUARDED_BY(mu_) = 0;
  uint64_t in_use_ PS_GUARDED_BY(mu_) = 0;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_DEVICE_PINNED_POOL_H_
