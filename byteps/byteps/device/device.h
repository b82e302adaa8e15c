// What is asked of a GPU, CUDA's driver, which answers, and what an engine builds on it:
// asynchronous copies and pinned memory.
#ifndef BYTEPS_DEVICE_DEVICE_H_
#define BYTEPS_DEVICE_DEVICE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/mutex.h"

namespace byteps {
namespace core {

// The few things that are asked of a GPU and its driver.  device/cuda.cc asks the driver, which
// it finds at run time; device/fake.cc plays a GPU for tests.
//
// Every function may be called by any thread and throws Error with the driver's words.  Streams
// and events belong to the device that was current when they were made; but for EventIsDone, that
// device has to be current for what is called with them, and some device to pin memory.

constexpr int kCpu = -1;  // the device number of host memory

using DeviceStream = void*;  // cudaStream_t
using DeviceEvent = void*;   // cudaEvent_t

// Lies in pinned memory: a stream waits for a thread of the host that sets it.
using DeviceWord = std::atomic<uint32_t>;
static_assert(sizeof(DeviceWord) == sizeof(uint32_t));

// Makes a device the calling thread's current one, and the one before again at its end.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
};

// Does not wait for the default stream, so that copies overlap with kernels.
DeviceStream MakeStream();
DeviceEvent MakeEvent();

// The event stands for all work that `stream` has now.
void RecordEvent(DeviceEvent event, DeviceStream stream);
// Whether that work is done.
bool EventIsDone(DeviceEvent event);
// Whether all work that `stream` has now is done.
bool StreamIsIdle(DeviceStream stream);
// What `stream` is given from now on waits for what `event` stands for now.
void WaitForEvent(DeviceStream stream, DeviceEvent event);
// Likewise, until `word` is 1.
void WaitForWord(DeviceStream stream, const DeviceWord* word);

// Enqueue a copy; the host memory is pinned.
void CopyToHost(void* host, const void* device, size_t bytes, DeviceStream stream);
void CopyToDevice(void* device, const void* host, size_t bytes, DeviceStream stream);

// Calls `then` once, on a thread of the driver's, when all work that `stream` has now is done.
// `then` must neither call anything of this file nor block.  It is not called, and is lost, if
// the device fails.
void CallWhenDone(DeviceStream stream, std::function<void()> then);

// Host memory that every device can copy from and to.
void* PinMemory(size_t bytes);

// The part of CUDA's driver interface that the engine calls, found at run time.

// Driver types as its binary interface has them, so that no CUDA header is needed to build.
using CudaResult = int;  // 0: success
using CudaDevice = int;
using CudaPointer = unsigned long long;  // an address in a GPU's memory
struct CudaContextObject;
struct CudaStreamObject;
struct CudaEventObject;
using CudaContext = CudaContextObject*;
using CudaStream = CudaStreamObject*;  // the same object as a cudaStream_t
using CudaEvent = CudaEventObject*;    // the same object as a cudaEvent_t

constexpr CudaResult kCudaSuccess = 0;
constexpr CudaResult kCudaNotReady = 600;
constexpr unsigned kCudaHostAllocPortable = 1;
constexpr unsigned kCudaEventDisableTiming = 2;
constexpr unsigned kCudaStreamNonBlocking = 1;
constexpr unsigned kCudaWaitValueEqual = 1;

// Every member is set.  The names are the driver's own, without the suffix of the binary
// interface's version, such as _v2, which this table fixes: one build serves every driver.
struct CudaApi {
  CudaResult (*cuInit)(unsigned flags);
  CudaResult (*cuGetErrorName)(CudaResult error, const char** text);
  CudaResult (*cuGetErrorString)(CudaResult error, const char** text);
  CudaResult (*cuDeviceGet)(CudaDevice* device, int ordinal);
  CudaResult (*cuDevicePrimaryCtxRetain)(CudaContext* context, CudaDevice device);
  CudaResult (*cuCtxPushCurrent)(CudaContext context);
  CudaResult (*cuCtxPopCurrent)(CudaContext* context);
  CudaResult (*cuMemHostAlloc)(void** memory, size_t bytes, unsigned flags);
  CudaResult (*cuEventCreate)(CudaEvent* event, unsigned flags);
  CudaResult (*cuEventRecord)(CudaEvent event, CudaStream stream);
  CudaResult (*cuEventQuery)(CudaEvent event);
  CudaResult (*cuStreamCreate)(CudaStream* stream, unsigned flags);
  CudaResult (*cuStreamQuery)(CudaStream stream);
  CudaResult (*cuStreamWaitEvent)(CudaStream stream, CudaEvent event, unsigned flags);
  CudaResult (*cuStreamWaitValue32)(CudaStream stream, CudaPointer word, unsigned value,
                                    unsigned flags);
  CudaResult (*cuLaunchHostFunc)(CudaStream stream, void (*function)(void* data), void* data);
  CudaResult (*cuMemcpyDtoHAsync)(void* host, CudaPointer device, size_t bytes, CudaStream stream);
  CudaResult (*cuMemcpyHtoDAsync)(CudaPointer device, const void* host, size_t bytes,
                                  CudaStream stream);
};

// Loads libcuda.so.1, once for the process, and initializes the driver.  Thread-safe.
// Throws Error that says what is missing: the library, a function of it (its driver is too
// old), or a GPU.  A failure is final: the next call throws the same.
const CudaApi& Cuda();

// Throws Error "`what`: the driver's words (CUDA_ERROR_...)" unless `result` is a success.
void CheckCuda(CudaResult result, const char* what);

// Makes `device`'s primary context, which is torch's too, the calling thread's current one.
// `device` counts as torch does, among CUDA_VISIBLE_DEVICES.  Throws Error.
void PushCudaDevice(int device);
// Brings back the one before.
void PopCudaDevice();

// Copies between one GPU and pinned host memory, of which the host only hears.
//
// Each direction has one stream: a GPU moves the copies of one direction one after the other
// anyway, and copies of a partition are long enough to fill PCIe.  What is to happen when a copy
// is done is called from another stream, which waits for an event behind the copy: a callback
// holds up the stream that it is in, and the next copy must not wait for it.  Nothing polls, and
// no thread sleeps in the driver, so that none is stuck there when the GPU's work never ends
// (an NCCL kernel whose peer was lost).

// A moment in the work of a stream; null: it had none left.  When the last copy goes, it is kept
// for reuse: that may be inside a callback of the driver's, where no event may be destroyed.
using DeviceMoment = std::shared_ptr<void>;

// Copies of a lane are made one after the other.
enum class CopyLane {
  kToHost,
  kFewToHost,    // few bytes, which do not wait for long copies
  kWholeToHost,  // all of a tensor at once, as the caller of a sum enqueues it
  kToDevice,
};

// What is copied: one end is on the device, the other in pinned memory.
struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

// Any thread may call anything.  Each function throws Error when the device fails.
// Callbacks are as CallWhenDone has them: on the driver's thread, not to block.
class DeviceCopies {
 public:
  // That of `device`, made at its first use.  It lives as long as the process.
  static DeviceCopies* Of(int device);

  explicit DeviceCopies(int device);
  DeviceCopies(const DeviceCopies&) = delete;
  DeviceCopies& operator=(const DeviceCopies&) = delete;

  // All that the caller's `stream` has been given so far.
  DeviceMoment Now(DeviceStream stream);
  static bool IsDone(const DeviceMoment& moment);
  // Calls `then` when all that `stream` was given before `moment` is done.
  void CallAfter(const DeviceMoment& moment, DeviceStream stream, std::function<void()> then);
  // Does nothing but throw where the device has failed, whose callbacks never come.
  void Check();

  // Enqueues copies.  The result: all are done.
  DeviceMoment Enqueue(CopyLane lane, const std::vector<Copy>& copies);
  // Copies that a lane is given from now on wait for `moment`.
  void MakeWait(CopyLane lane, const DeviceMoment& moment);
  // Calls `then` when `copied`, which Enqueue gave, is done.
  void CallAfter(CopyLane lane, const DeviceMoment& copied, std::function<void()> then);
  // Likewise, but first this thread waits a moment: a short copy takes a fraction of the time until
  // the driver calls.  True: it is done, and nothing is called.
  bool AwaitOrCallAfter(CopyLane lane, const DeviceMoment& copied, std::function<void()> then);
  // All copies to the device so far are done.
  DeviceMoment CopiedToDevice();
  // What the caller's `stream` is given from now on waits for `moment`.
  void MakeWait(DeviceStream stream, const DeviceMoment& moment);
  // Enqueues copies to the device in the caller's `stream`.  The result: all are made.
  DeviceMoment CopyIn(DeviceStream stream, const std::vector<Copy>& copies);
  // Likewise, but the stream waits until `word` is 1.
  void CopyOnceSet(DeviceStream stream, const DeviceWord* word, const std::vector<Copy>& copies);

 private:
  // The stream of a lane, and the one from which is called.
  struct Streams {
    DeviceStream work = nullptr;
    DeviceStream calls = nullptr;
  };
  class Events;

  DeviceMoment MomentOf(DeviceStream stream);
  DeviceMoment NowIn(DeviceStream stream);
  // One for each stream of the caller's, so that none waits for what another one computes.
  DeviceStream CallsFor(DeviceStream stream);

  const int device_;
  const std::shared_ptr<Events> events_;
  std::map<CopyLane, Streams> lanes_;  // does not change
  ps::Mutex mu_;
  std::map<DeviceStream, DeviceStream> callers_ PS_GUARDED_BY(mu_);
};

// Copies of one engine between a GPU and pinned memory, one queue for each direction.
//
// A driver serves one caller at a time, and callers that come in crowds hold each other up for
// longer than their copies take.  So one thread at a time gives copies to it, a turn after the
// other; what others ask for meanwhile goes with its next turn.  It awaits the copies of a turn for
// a moment: that takes less time than a call by the driver, of the cores too, since a call
// wakes two threads.

// Any thread may call anything.
class CopyQueue {
 public:
  struct Entry {
    Copy copy;
    // Called once, by Add of this thread or of another one that is in it: the device has the copy,
    // or failed, with its words.  After a failure the copy may still be made, at any time.
    std::function<void(const std::string& error)> begun;
    // As CallWhenDone has it: on the driver's thread, or on one that is in Add; not to block;
    // perhaps before `begun`.
    std::function<void()> done;
  };

  CopyQueue(int device, CopyLane lane) : device_(device), lane_(lane) {}
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;

  // Gives the copy to the device, or leaves that to the thread that does so now.
  void Add(Entry entry);
  // Leaves the copy to the thread that gives copies to the device now, and takes it from *entry.
  // False: no thread does.
  bool Leave(Entry* entry);

 private:
  // Moving entries from one to another takes no memory, and so cannot fail.
  using Entries = std::list<Entry>;

  // What goes in one turn; at least one entry.
  struct Turn {
    Entries entries;
    size_t bytes = 0;

    void CallDone() const;
  };

  // False, with nothing to give: this thread does so no longer.
  bool TakeTurn(Turn* turn);
  // Does not throw: who gives copies to the device goes on with the next ones.
  void Give(Turn turn) noexcept;
  // Without its error, or the operation, a waiting one is ended by its time-out.
  static void TellBegun(const Entry& entry, const std::string& error);
  // Until the copies are done, or will be told of by the driver.
  void AwaitOrCall(const std::shared_ptr<const Turn>& turn);

  const int device_;
  const CopyLane lane_;
  ps::Mutex mu_;
  Entries waiting_ PS_GUARDED_BY(mu_);
  bool taken_ PS_GUARDED_BY(mu_) = false;  // a thread gives copies to the device
};

// The queues of all devices.
class CopyQueues {
 public:
  CopyQueue* Of(int device, CopyLane lane);

 private:
  ps::Mutex mu_;
  std::map<std::pair<int, CopyLane>, std::unique_ptr<CopyQueue>> queues_ PS_GUARDED_BY(mu_);
};

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

#endif  // BYTEPS_DEVICE_DEVICE_H_
