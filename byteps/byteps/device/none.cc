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
CurrentDevice::CurrentDevice(int) { Refuse(); }
CurrentDevice::~CurrentDevice() = default;
DeviceStream MakeStream() { Refuse(); }
DeviceEvent MakeEvent() { Refuse(); }
void RecordEvent(DeviceEvent, DeviceStream) { Refuse(); }
bool EventIsDone(DeviceEvent) { Refuse(); }
void WaitForEvent(DeviceStream, DeviceEvent) { Refuse(); }
void CopyToHost(void*, const void*, size_t, DeviceStream) { Refuse(); }
void CopyToDevice(void*, const void*, size_t, DeviceStream) { Refuse(); }
void CallWhenDone(DeviceStream, std::function<void()>) { Refuse(); }
void* PinMemory(size_t) { Refuse(); }
void UnpinMemory(void*) { Refuse(); }

}  // namespace core
}  // namespace byteps
