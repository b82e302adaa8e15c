// The sum of a tensor on a GPU that lies in pinned memory as a whole, from the copy out of its
// tensor to the copy back.  Between the two it is as one of a tensor on the CPU: the engine pushes
// from that memory, and receives into it.
//
// One kind is of any size, and streams wait for it, and no thread:
//
//   PushPull: enqueues copies of all values to pinned memory, and is told by the driver of each
//   Land:     enqueues, in the caller's stream, waiting for a word, and copies back
//   engine:   sets the words
//
// Between the two no thread of the engine calls the driver.  A caller may be in it for as long as a
// stream waits: to load a kernel at its first use, or to free memory, the driver waits until all
// streams are idle, and meanwhile other threads that enqueue copies are held up.  So a sum that
// needed one of them could never come.  What was enqueued goes on, and so do calls by the driver.
//
// The other kind is small, and alone in flight.  Its caller copies all of it by a call or two of
// the driver, before PushPull returns and when its sum has come.  So no other thread of the engine
// has to be woken for a copy, which would take as long as several partitions do on a fast link.
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

// Any thread may call anything.
class StagedSum : public std::enable_shared_from_this<StagedSum> {
 public:
  // A sum that is alone is small up to so many bytes.
  static constexpr uint64_t kSmall = 1 << 20;

  // Bytes of the largest block that sums take from their pool of at most `limit` bytes: neighbours
  // lie in one, so that they are copied by one call of the driver.
  static uint64_t LargestBlock(uint64_t limit, uint64_t largest_partition);
  // Takes pinned memory for all partitions.  Null: the pool has not enough.  The operation, which
  // is to be of this sum, may be with nobody else yet.
  static std::shared_ptr<StagedSum> TryMake(const Operation& operation, PinnedPool* pool);
  StagedSum(const StagedSum&) = delete;
  StagedSum& operator=(const StagedSum&) = delete;

  // The memory of a partition.
  char* MemoryOf(uint64_t index) const { return partitions_[index].memory.get(); }

  // Enqueues the copies to the host.  `copied` is called for partitions from one place in the order
  // up to another, on the driver's thread, and must not block; it keeps the operation.
  void CopyToHost(const DeviceMoment& ready, const std::function<void(size_t, size_t)>& copied);
  // Of a small sum whose values are there.  True: they are in its memory.  False: that takes longer
  // than waiting is worth, and `copied` is called as above.
  bool CopyToHostNow(const std::function<void()>& copied);
  // Whether a partition is there, to be pushed.
  bool has_copied() const { return has_copied_; }
  // What to hold while that memory is being sent.  Null: it failed, and is not to be sent.
  std::shared_ptr<void> BeginSend();
  // The sum of a partition is in its memory.
  void Arrive(uint64_t index);
  // Enqueues the copies back, once: `stream` waits for the sums, or for Fail.  `operation` is that
  // of this sum.
  Landing CopyToDevice(const OperationPtr& operation, DeviceStream stream);
  // Of a small sum that has come: enqueues the copies back.  The result: they are made.
  DeviceMoment CopyBack(DeviceStream stream);
  // Whether CopyToDevice was called.
  bool is_awaited() const { return is_awaited_; }
  // Nobody gets its memory again.
  void KeepMemory() const;
  // The operation failed: nothing more of it is sent.
  void BeginFail();
  // After that, and once nobody writes into the memory any more: streams get NaN (-1 where values
  // are whole numbers), and go on.  Waits until `deadline` for what is being sent: who gets NaN by
  // then has a job that failed, too.
  void Fail(std::chrono::steady_clock::time_point deadline);

 private:
  struct Partition {
    PinnedBlock memory;
    Operation::Part whole;
    Operation::Part wanted;
    size_t chunk = 0;
  };
  // Partitions that are copied together: there are few, since each takes several calls.
  struct Chunk {
    size_t begin = 0;  // in the order
    size_t end = 0;
    std::atomic<size_t> left{0};  // partitions whose sums have not arrived
    DeviceWord* summed = nullptr;
    bool is_copied = false;
  };

  StagedSum(const Operation& operation, std::vector<uint32_t> order);

  void Cut(uint64_t bytes);
  // One for neighbours that lie together at both ends.
  template <typename CopyOf>
  std::vector<Copy> CopiesOf(const Chunk& chunk, CopyOf copy_of) const;
  // Of a chunk's values to its memory.
  std::vector<Copy> CopiesToHost(const Chunk& chunk) const;
  // Of its wanted sums to the tensor.
  std::vector<Copy> CopiesToDevice(const Chunk& chunk) const;
  // Takes memory for the partitions of a chunk, neighbours in one block.  False: there is none.
  bool TakeMemory(const Chunk& chunk, uint64_t bytes, PinnedPool* pool);
  // Indices of a chunk's partitions, as they lie in the tensor.
  std::vector<uint32_t> InPlace(const Chunk& chunk) const;
  void OnCopied(size_t chunk);
  void EndSend();
  char* Wanted(const Partition& partition) const;
  // Makes all of a chunk NaN, and lets streams go on.
  void Spoil(const Chunk& chunk) const;

  const int device_;
  const char* const input_;
  char* const output_;
  const std::vector<uint32_t> order_;
  std::vector<Partition> partitions_;  // by index
  std::deque<Chunk> chunks_;           // does not change, but for the chunks
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
