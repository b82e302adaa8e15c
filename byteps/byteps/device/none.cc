// The build without CUDA: nothing here is reached with a CPU tensor.
#include "byteps/base/error.h"
#include "byteps/device/device.h"

namespace byteps {
namespace core {
namespace {

[[noreturn]] void Refuse() {
  throw UsageError(
      "this byteps was built without CUDA and takes CPU tensors only; build it where nvcc or the "
      "CUDA headers are");
}

}  // namespace

bool BuiltWithCuda() { return false; }
StagingBuffer::StagingBuffer(int, size_t) { Refuse(); }
StagingBuffer::~StagingBuffer() = default;
ReadyEvent::ReadyEvent(int, void*) : device_(kCpu) { Refuse(); }
ReadyEvent::~ReadyEvent() = default;
DeviceCopier::~DeviceCopier() = default;
void* DeviceCopier::StreamOf(int) { Refuse(); }
void DeviceCopier::ToHost(const ReadyEvent&, void*, const void*, size_t) { Refuse(); }
void DeviceCopier::ToDevice(int, void*, const void*, size_t) { Refuse(); }

}  // namespace core
}  // namespace byteps
