#include <string>

#include "byteps/base/error.h"
#include "byteps/device/cuda_api.h"
#include "byteps/device/device.h"
#include "ps/lasting_memory.h"

namespace byteps {
namespace core {
namespace {

// For destructors: an error means that the driver is gone already, at exit.
template <typename Release>
void ReleaseOn(int device, const Release& release) {
  try {
    const CudaDeviceScope scope(device);
    (void)release();
  } catch (const Error&) {
  }
}

}  // namespace

StagingBuffer::StagingBuffer(int device, size_t bytes) : device_(device) {
  const CudaDeviceScope scope(device);
  void* memory = nullptr;
  CheckCuda(Cuda().cuMemHostAlloc(&memory, bytes, kCudaHostAllocPortable),
            ("pinning " + std::to_string(bytes) + " bytes of host memory").c_str());
  data_ = static_cast<char*>(memory);
  lasting_ = ps::LastingMemory::Add(data_, bytes);
}

StagingBuffer::~StagingBuffer() {
  ps::LastingMemory::Remove(lasting_);
  ReleaseOn(device_, [this] { return Cuda().cuMemFreeHost(data_); });
}

ReadyEvent::ReadyEvent(int device, void* stream) : device_(device) {
  const CudaDeviceScope scope(device);
  CudaEvent event = nullptr;
  CheckCuda(Cuda().cuEventCreate(&event, kCudaEventDisableTiming), "cuEventCreate");
  event_ = event;
  CheckCuda(Cuda().cuEventRecord(event, static_cast<CudaStream>(stream)), "cuEventRecord");
}

ReadyEvent::~ReadyEvent() {
  ReleaseOn(device_, [this] { return Cuda().cuEventDestroy(static_cast<CudaEvent>(event_)); });
}

DeviceCopier::~DeviceCopier() { ReleaseStream(); }

void DeviceCopier::ReleaseStream() {
  if (stream_ == nullptr) return;
  ReleaseOn(device_, [this] { return Cuda().cuStreamDestroy(static_cast<CudaStream>(stream_)); });
  stream_ = nullptr;
}

void* DeviceCopier::StreamOf(int device) {
  if (stream_ != nullptr && device_ == device) return stream_;
  ReleaseStream();
  CudaStream stream = nullptr;
  // Not the legacy default stream's follower: copies must overlap with kernels.
  CheckCuda(Cuda().cuStreamCreate(&stream, kCudaStreamNonBlocking), "cuStreamCreate");
  device_ = device;
  stream_ = stream;
  return stream_;
}

void DeviceCopier::ToHost(const ReadyEvent& ready, void* host, const void* device_pointer,
                          size_t bytes) {
  const CudaDeviceScope scope(ready.device());
  const auto stream = static_cast<CudaStream>(StreamOf(ready.device()));
  CheckCuda(Cuda().cuStreamWaitEvent(stream, static_cast<CudaEvent>(ready.event()), 0),
            "cuStreamWaitEvent");
  CheckCuda(
      Cuda().cuMemcpyDtoHAsync(host, reinterpret_cast<CudaPointer>(device_pointer), bytes, stream),
      "copy to the host");
  CheckCuda(Cuda().cuStreamSynchronize(stream), "copy to the host");
}

void DeviceCopier::ToDevice(int device, void* device_pointer, const void* host, size_t bytes) {
  const CudaDeviceScope scope(device);
  const auto stream = static_cast<CudaStream>(StreamOf(device));
  CheckCuda(
      Cuda().cuMemcpyHtoDAsync(reinterpret_cast<CudaPointer>(device_pointer), host, bytes, stream),
      "copy to the device");
  CheckCuda(Cuda().cuStreamSynchronize(stream), "copy to the device");
}

}  // namespace core
}  // namespace byteps
