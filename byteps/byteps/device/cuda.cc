#include <cuda_runtime_api.h>

#include <string>

#include "byteps/base/error.h"
#include "byteps/device/device.h"
#include "ps/lasting_memory.h"

namespace byteps {
namespace core {
namespace {

void Check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw Error(std::string(what) + ": " + cudaGetErrorString(status));
}

}  // namespace

bool BuiltWithCuda() { return true; }

StagingBuffer::StagingBuffer(int device, size_t bytes) {
  Check(cudaSetDevice(device), "cudaSetDevice");
  void* memory = nullptr;
  Check(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable),
        ("pinning " + std::to_string(bytes) + " bytes of host memory").c_str());
  data_ = static_cast<char*>(memory);
  lasting_ = ps::LastingMemory::Add(data_, bytes);
}

StagingBuffer::~StagingBuffer() {
  ps::LastingMemory::Remove(lasting_);
  (void)cudaFreeHost(data_);  // an error means that the driver is gone already, at exit
}

ReadyEvent::ReadyEvent(int device, void* stream) : device_(device) {
  Check(cudaSetDevice(device), "cudaSetDevice");
  cudaEvent_t event = nullptr;
  Check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  event_ = event;
  Check(cudaEventRecord(event, static_cast<cudaStream_t>(stream)), "cudaEventRecord");
}

ReadyEvent::~ReadyEvent() { (void)cudaEventDestroy(static_cast<cudaEvent_t>(event_)); }

DeviceCopier::~DeviceCopier() {
  if (stream_ != nullptr) (void)cudaStreamDestroy(static_cast<cudaStream_t>(stream_));
}

void* DeviceCopier::StreamOf(int device) {
  Check(cudaSetDevice(device), "cudaSetDevice");
  if (stream_ != nullptr && device_ == device) return stream_;
  if (stream_ != nullptr)
    Check(cudaStreamDestroy(static_cast<cudaStream_t>(stream_)), "cudaStreamDestroy");
  cudaStream_t stream = nullptr;
  // Not the legacy default stream's follower: copies must overlap with kernels.
  Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  device_ = device;
  stream_ = stream;
  return stream_;
}

void DeviceCopier::ToHost(const ReadyEvent& ready, void* host, const void* device_pointer,
                          size_t bytes) {
  auto stream = static_cast<cudaStream_t>(StreamOf(ready.device()));
  Check(cudaStreamWaitEvent(stream, static_cast<cudaEvent_t>(ready.event()), 0),
        "cudaStreamWaitEvent");
  Check(cudaMemcpyAsync(host, device_pointer, bytes, cudaMemcpyDeviceToHost, stream),
        "copy to the host");
  Check(cudaStreamSynchronize(stream), "copy to the host");
}

void DeviceCopier::ToDevice(int device, void* device_pointer, const void* host, size_t bytes) {
  auto stream = static_cast<cudaStream_t>(StreamOf(device));
  Check(cudaMemcpyAsync(device_pointer, host, bytes, cudaMemcpyHostToDevice, stream),
        "copy to the device");
  Check(cudaStreamSynchronize(stream), "copy to the device");
}

}  // namespace core
}  // namespace byteps
