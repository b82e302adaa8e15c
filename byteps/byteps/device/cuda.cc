#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <utility>

#include "byteps/base/error.h"
#include "byteps/device/device.h"

namespace byteps {
namespace core {
namespace {

void Check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw Error(std::string(what) + ": " + cudaGetErrorString(status));
}

cudaStream_t Stream(DeviceStream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t Event(DeviceEvent event) { return static_cast<cudaEvent_t>(event); }

void CUDART_CB CallAndDelete(void* function) {
  const std::unique_ptr<std::function<void()>> then(static_cast<std::function<void()>*>(function));
  (*then)();
}

}  // namespace

bool BuiltWithCuda() { return true; }

CurrentDevice::CurrentDevice(int device) {
  int now = kCpu;
  Check(cudaGetDevice(&now), "cudaGetDevice");
  if (now == device) return;
  Check(cudaSetDevice(device), "cudaSetDevice");
  before_ = now;
}

CurrentDevice::~CurrentDevice() {
  if (before_ != kCpu) (void)cudaSetDevice(before_);
}

DeviceStream MakeStream() {
  cudaStream_t stream = nullptr;
  Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  return stream;
}

DeviceEvent MakeEvent() {
  cudaEvent_t event = nullptr;
  Check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  return event;
}

void RecordEvent(DeviceEvent event, DeviceStream stream) {
  Check(cudaEventRecord(Event(event), Stream(stream)), "cudaEventRecord");
}

bool EventIsDone(DeviceEvent event) {
  const cudaError_t status = cudaEventQuery(Event(event));
  if (status == cudaErrorNotReady) return false;
  Check(status, "work on the GPU");
  return true;
}

void WaitForEvent(DeviceStream stream, DeviceEvent event) {
  Check(cudaStreamWaitEvent(Stream(stream), Event(event), 0), "cudaStreamWaitEvent");
}

void CopyToHost(void* host, const void* device, size_t bytes, DeviceStream stream) {
  Check(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, Stream(stream)),
        "copy to the host");
}

void CopyToDevice(void* device, const void* host, size_t bytes, DeviceStream stream) {
  Check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, Stream(stream)),
        "copy to the device");
}

void CallWhenDone(DeviceStream stream, std::function<void()> then) {
  auto function = std::make_unique<std::function<void()>>(std::move(then));
  Check(cudaLaunchHostFunc(Stream(stream), CallAndDelete, function.get()), "cudaLaunchHostFunc");
  (void)function.release();  // CallAndDelete's now
}

void* PinMemory(size_t bytes) {
  void* memory = nullptr;
  Check(
      cudaHostAlloc(&memory, bytes, cudaHostAllocPortable),
      ("pinning " + std::to_string(bytes) + " bytes of host memory (BYTEPS_PINNED_BYTES)").c_str());
  return memory;
}

void UnpinMemory(void* memory) { (void)cudaFreeHost(memory); }

}  // namespace core
}  // namespace byteps
