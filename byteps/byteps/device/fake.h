// Simulated GPU for tests: streams are threads, and device memory is host memory.
//
// It is stricter than CUDA. It throws if an event or stream is used while another device is
// current, if a copy uses memory that is not pinned, and at any call from a callback.
#ifndef BYTEPS_DEVICE_FAKE_H_
#define BYTEPS_DEVICE_FAKE_H_

#include <cstdint>
#include <future>
#include <memory>

#include "byteps/device/device.h"

namespace byteps {
namespace core {
namespace fake {

// Blocks the stream until the result's value is set.
std::shared_ptr<std::promise<void>> Hold(DeviceStream stream);
// Blocks all copies to devices, or to the host, until the result's value is set.
std::shared_ptr<std::promise<void>> HoldCopiesToDevice();
std::shared_ptr<std::promise<void>> HoldCopiesToHost();
// Blocks calls by other threads until the result's value is set, as a driver does while it waits
// for a stream.
std::shared_ptr<std::promise<void>> HoldCalls();
// Blocks until the stream has done all its work.
void Synchronize(DeviceStream stream);
// The calling thread's device.
int CurrentDeviceNumber();
void SetCurrentDevice(int device);
// While `broken`, makes every call fail and runs no callbacks.
void SetBroken(bool broken);
uint64_t PinnedBytes();
// Number of the process's copies so far, in both directions.
uint64_t CountCopies();

}  // namespace fake
}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_DEVICE_FAKE_H_
