// The GPU and its driver as the engine uses them: streams, events, asynchronous copies, pinned
// memory.
#ifndef BYTEPS_DEVICE_DEVICE_H_
#define BYTEPS_DEVICE_DEVICE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

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

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_DEVICE_DEVICE_H_
