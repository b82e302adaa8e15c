// A GPU that tests play: streams are threads, the device's memory is the host's.
//
// It is stricter than CUDA: an event or stream that is used while another device is current, a
// copy from or to memory that is not pinned, and any call from a callback are errors.
#ifndef BYTEPS_DEVICE_FAKE_H_
#define BYTEPS_DEVICE_FAKE_H_

#include <cstdint>
#include <future>
#include <memory>

#include "byteps/device/device.h"

namespace byteps {
namespace core {
namespace fake {

// A stream does nothing more until the result's value is set.
std::shared_ptr<std::promise<void>> Hold(DeviceStream stream);
// No copy to a device, or to the host, is made until the result's value is set.
std::shared_ptr<std::promise<void>> HoldCopiesToDevice();
std::shared_ptr<std::promise<void>> HoldCopiesToHost();
// Calls by other threads than this one do not return until the result's value is set, as those of a
// driver do while it waits for a stream.
std::shared_ptr<std::promise<void>> HoldCalls();
// Blocks until a stream has done all its work.
void Synchronize(DeviceStream stream);
// The calling thread's.
int CurrentDeviceNumber();
void SetCurrentDevice(int device);
// While true, every call fails, and callbacks do not come.
void SetBroken(bool broken);
uint64_t PinnedBytes();
// Copies of the process so far, in either direction.
uint64_t CountCopies();

}  // namespace fake
}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_DEVICE_FAKE_H_
