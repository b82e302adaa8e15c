#ifndef BYTEPS_DEVICE_DEVICE_H_
#define BYTEPS_DEVICE_DEVICE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace byteps {
namespace core {

// GPU as the engine uses it: streams, events, asynchronous copies, pinned memory. device/cuda.cc
// calls the driver; device/fake.cc simulates a GPU for tests.
//
// All functions are thread-safe, and throw Error with the driver's text. A stream or event belongs
// to the device that was current when it was made. That device must be current in every call with
// the stream or event, except in EventIsDone. To pin memory, some device must be current.

constexpr int kCpu = -1;  // device number of host memory

using DeviceStream = void*;  // a cudaStream_t
using DeviceEvent = void*;   // a cudaEvent_t

// Word in pinned memory: a stream waits for it until a host thread sets it.
using DeviceWord = std::atomic<uint32_t>;
static_assert(sizeof(DeviceWord) == sizeof(uint32_t));

// Makes a device current in the calling thread, and restores the previous one when destroyed.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
};

// Makes a stream that does not wait for the default stream, so copies overlap with kernels.
DeviceStream MakeStream();
DeviceEvent MakeEvent();

// Makes the event stand for all work now in `stream`.
void RecordEvent(DeviceEvent event, DeviceStream stream);
// Returns whether the event's work is done.
bool EventIsDone(DeviceEvent event);
// Returns whether all work now in `stream` is done.
bool StreamIsIdle(DeviceStream stream);
// Makes later work of `stream` wait for the work that `event` has recorded most recently.
void WaitForEvent(DeviceStream stream, DeviceEvent event);
// Makes later work of `stream` wait until `word` is 1.
void WaitForWord(DeviceStream stream, const DeviceWord* word);

// Enqueue a copy; the host memory must be pinned.
void CopyToHost(void* host, const void* device, size_t bytes, DeviceStream stream);
void CopyToDevice(void* device, const void* host, size_t bytes, DeviceStream stream);

// Calls `then` once, on a thread of the driver, when all work now in `stream` is done. `then` must
// not block, nor call functions of this file. If the device fails, `then` is neither called nor
// destroyed.
void CallWhenDone(DeviceStream stream, std::function<void()> then);

// Returns host memory that every device can copy to and from.
void* PinMemory(size_t bytes);

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_DEVICE_DEVICE_H_
