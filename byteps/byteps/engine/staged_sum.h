// Sum of a GPU tensor that lies in pinned memory as a whole, from the copy to the host until the
// copy back to the GPU. Meanwhile the engine treats it like the sum of a CPU tensor: it pushes from
// the pinned memory and receives into it. There are two kinds of staged sums.
//
// A streamed sum has any size. Streams wait for it, and no thread does:
//
//   PushPull: enqueues copies of all values to pinned memory; the driver reports each copy
//   Land:     enqueues, in the caller's stream, a wait for a word, and the copies back
//   engine:   sets the words
//
// Between PushPull and the end no engine thread calls the driver. While a stream waits, another
// thread may be inside the driver to load a kernel or to free memory. The driver then waits until
// all streams are idle, and blocks every thread that enqueues a copy. A sum that needed such a copy
// would deadlock. Copies that were enqueued before go on, and so do callbacks of the driver.
//
// A sum counts as small if no other operation is in flight. The thread that calls PushPull copies
// the whole tensor with one or two driver calls, before PushPull returns. The thread that waits for
// the sum copies it back. So no engine thread has to be woken for a copy, which would take as long
// as sending several partitions over a fast link.
#ifndef BYTEPS_ENGINE_STAGED_SUM_H_
#define BYTEPS_ENGINE_STAGED_SUM_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/device/device.h"
#include "byteps/device/device_copies.h"
#include "byteps/device/pinned_pool.h"
#include "byteps/engine/operation.h"
#include "byteps/engine/streamed_sums.h"

namespace byteps {
namespace core {

// Thread-safe.
class StagedSum : public std::enable_shared_from_this<StagedSum> {
 public:
  // Size limit of a small sum, in bytes.
  static constexpr uint64_t kSmall = 1 << 20;

  // Returns the bytes of the largest block that sums take from a pool of `limit` bytes.
  // Neighbouring partitions share a block, so that one call of the driver copies them.
  static uint64_t LargestBlock(uint64_t limit, uint64_t largest_partition);
  // Makes a sum with pinned memory for all partitions. Returns null if the pool has too little
  // memory. Call before any other thread sees the operation.
  static std::shared_ptr<StagedSum> TryMake(const Operation& operation, PinnedPool* pool);
  StagedSum(const StagedSum&) = delete;
  StagedSum& operator=(const StagedSum&) = delete;

  // Pinned memory of a partition.
  char* MemoryOf(uint64_t index) const { return partitions_[index].memory.get(); }

  // Enqueues the copies to the host. The driver's thread calls `copied` for each copied part, with
  // a range of Plan::Layout::order. `copied` must not block, and must keep the operation alive.
  void CopyToHost(const DeviceMoment& ready, const std::function<void(size_t, size_t)>& copied);
  // Copies a small sum whose values are ready. Returns true if the copy is done. If the copy takes
  // long, returns false, and the driver's thread calls `copied` later.
  bool CopyToHostNow(const std::function<void()>& copied);
  // Returns whether values of any partition were copied to the host, so that they can be pushed.
  bool has_copied() const { return has_copied_; }
  // Returns a guard to hold while the memory is being sent. Returns null if the sum failed; the
  // caller must not send then.
  std::shared_ptr<void> BeginSend();
  // Records that a partition's sum has arrived in the partition's pinned memory.
  void Arrive(uint64_t index);
  // Enqueues the copies back to the GPU. Call once. `stream` waits for the sums, or for Fail.
  // `operation` owns this object.
  Landing CopyToDevice(const OperationPtr& operation, DeviceStream stream);
  // Enqueues the copies back to the GPU, of a small sum that has arrived. Returns the moment at
  // which the copies are done.
  DeviceMoment CopyBack(DeviceStream stream);
  // Returns whether CopyToDevice was called.
  bool is_awaited() const { return is_awaited_; }
  // Keeps the memory out of the pool for ever.
  void KeepMemory() const;
  // Makes later calls of BeginSend return null, because the operation has failed.
  void BeginFail();
  // Releases waiting streams, with NaN (-1 for integers) in their sums. Call after BeginFail, when
  // nothing writes into the memory any more. Waits until `deadline` for sends in flight. A send
  // that takes longer may send NaN to a peer; the peer's job has then failed, too.
  void Fail(std::chrono::steady_clock::time_point deadline);

 private:
  struct Partition {
    PinnedBlock memory;
    Operation::Part whole;
    Operation::Part wanted;
    size_t chunk = 0;
  };
  // Partitions that are copied together. Chunks are few, because each takes several driver calls.
  struct Chunk {
    size_t begin = 0;  // range of Plan::Layout::order
    size_t end = 0;
    std::atomic<size_t> left{0};  // number of partitions whose sums have not arrived
    DeviceWord* summed = nullptr;
    bool is_copied = false;
  };

  StagedSum(const Operation& operation, std::vector<uint32_t> order);

  void Cut(uint64_t bytes);
  // Returns the copies of a chunk's partitions. One copy serves partitions that are adjacent both
  // in the source and in the destination.
  template <typename CopyOf>
  std::vector<Copy> CopiesOf(const Chunk& chunk, CopyOf copy_of) const;
  // Returns the copies from the tensor to the chunk's memory.
  std::vector<Copy> CopiesToHost(const Chunk& chunk) const;
  // Returns the copies of the wanted sums, from the chunk's memory to the tensor.
  std::vector<Copy> CopiesToDevice(const Chunk& chunk) const;
  // Takes memory for a chunk's partitions; neighbouring partitions share a block. Returns false if
  // the pool has too little memory.
  bool TakeMemory(const Chunk& chunk, uint64_t bytes, PinnedPool* pool);
  // Returns the indices of a chunk's partitions, in the order of the tensor.
  std::vector<uint32_t> InPlace(const Chunk& chunk) const;
  void OnCopied(size_t chunk);
  void EndSend();
  char* Wanted(const Partition& partition) const;
  // Fills a chunk with NaN, and releases the streams that wait for it.
  void Spoil(const Chunk& chunk) const;

  const int device_;
  const char* const input_;
  char* const output_;
  const std::vector<uint32_t> order_;
  std::vector<Partition> partitions_;  // by index
  std::deque<Chunk> chunks_;           // only the elements change, never their number
  PinnedBlock words_;
  std::atomic<bool> has_copied_{false};
  std::atomic<bool> is_awaited_{false};
  ps::Mutex mu_;  // guards Chunk::is_copied
  ps::CondVar sent_;
  int sending_ PS_GUARDED_BY(mu_) = 0;
  bool has_failed_ PS_GUARDED_BY(mu_) = false;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_STAGED_SUM_H_
