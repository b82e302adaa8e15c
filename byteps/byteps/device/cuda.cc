// The GPU interface, implemented by CUDA's driver.

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/mutex.h"
#include "byteps/device/cuda_api.h"
#include "byteps/device/device.h"

namespace byteps {
namespace core {

// The functions below call the driver's interface, not the run-time library's. A driver has the
// functions of all earlier drivers, so one build serves CUDA 12 and 13. A run-time library that is
// linked in refuses older drivers, and one that is shared with torch changes its name with each
// major version. Both interfaces act on the same contexts, streams and events.

namespace {

CudaStream Stream(DeviceStream stream) { return static_cast<CudaStream>(stream); }
CudaEvent Event(DeviceEvent event) { return static_cast<CudaEvent>(event); }
CudaPointer Pointer(const void* memory) { return reinterpret_cast<CudaPointer>(memory); }

// Returns whether a query's result means "done". Throws Error for failures.
bool IsDone(CudaResult result) {
  if (result == kCudaNotReady) return false;
  CheckCuda(result, "work on the GPU");
  return true;
}

void CallAndDelete(void* function) {
  const std::unique_ptr<std::function<void()>> then(static_cast<std::function<void()>*>(function));
  (*then)();
}

}  // namespace

CurrentDevice::CurrentDevice(int device) { PushCudaDevice(device); }

CurrentDevice::~CurrentDevice() { PopCudaDevice(); }

DeviceStream MakeStream() {
  CudaStream stream = nullptr;
  CheckCuda(Cuda().cuStreamCreate(&stream, kCudaStreamNonBlocking), "cuStreamCreate");
  return stream;
}

DeviceEvent MakeEvent() {
  CudaEvent event = nullptr;
  CheckCuda(Cuda().cuEventCreate(&event, kCudaEventDisableTiming), "cuEventCreate");
  return event;
}

void RecordEvent(DeviceEvent event, DeviceStream stream) {
  CheckCuda(Cuda().cuEventRecord(Event(event), Stream(stream)), "cuEventRecord");
}

bool EventIsDone(DeviceEvent event) { return IsDone(Cuda().cuEventQuery(Event(event))); }

bool StreamIsIdle(DeviceStream stream) { return IsDone(Cuda().cuStreamQuery(Stream(stream))); }

void WaitForEvent(DeviceStream stream, DeviceEvent event) {
  CheckCuda(Cuda().cuStreamWaitEvent(Stream(stream), Event(event), 0), "cuStreamWaitEvent");
}

void WaitForWord(DeviceStream stream, const DeviceWord* word) {
  CheckCuda(Cuda().cuStreamWaitValue32(Stream(stream), Pointer(word), 1, kCudaWaitValueEqual),
            "cuStreamWaitValue32");
}

void CopyToHost(void* host, const void* device, size_t bytes, DeviceStream stream) {
  CheckCuda(Cuda().cuMemcpyDtoHAsync(host, Pointer(device), bytes, Stream(stream)),
            "copy to the host");
}

void CopyToDevice(void* device, const void* host, size_t bytes, DeviceStream stream) {
  CheckCuda(Cuda().cuMemcpyHtoDAsync(Pointer(device), host, bytes, Stream(stream)),
            "copy to the device");
}

void CallWhenDone(DeviceStream stream, std::function<void()> then) {
  auto function = std::make_unique<std::function<void()>>(std::move(then));
  CheckCuda(Cuda().cuLaunchHostFunc(Stream(stream), CallAndDelete, function.get()),
            "cuLaunchHostFunc");
  (void)function.release();  // CallAndDelete owns the function now
}

void* PinMemory(size_t bytes) {
  void* memory = nullptr;
  CheckCuda(
      Cuda().cuMemHostAlloc(&memory, bytes, kCudaHostAllocPortable),
      ("pinning " + std::to_string(bytes) + " bytes of host memory (BYTEPS_PINNED_BYTES)").c_str());
  return memory;
}

}  // namespace core
}  // namespace byteps
