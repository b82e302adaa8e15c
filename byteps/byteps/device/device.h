// Copies between a GPU and the host.
#ifndef BYTEPS_DEVICE_DEVICE_H_
#define BYTEPS_DEVICE_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>

namespace byteps {
namespace core {

constexpr int kCpu = -1;  // the device number of host memory

// Pinned host memory for one tensor that lives on a GPU.
class StagingBuffer {
 public:
  // Throws Error when the memory cannot be pinned.
  StagingBuffer(int device, size_t bytes);
  ~StagingBuffer();
  StagingBuffer(const StagingBuffer&) = delete;
  StagingBuffer& operator=(const StagingBuffer&) = delete;

  char* data() { return data_; }

 private:
  const int device_;
  char* data_ = nullptr;
  uint64_t lasting_ = 0;  // as lasting memory: a transport may register it once
};

// The point in a stream's work at which a tensor's values are there.
class ReadyEvent {
 public:
  // `stream` is a cudaStream_t of `device`; throws Error when the driver does.
  ReadyEvent(int device, void* stream);
  ~ReadyEvent();
  ReadyEvent(const ReadyEvent&) = delete;
  ReadyEvent& operator=(const ReadyEvent&) = delete;

  int device() const { return device_; }
  void* event() const { return event_; }

 private:
  int device_;
  void* event_ = nullptr;
};

// One thread's stream of copies.  Both calls return when the bytes are there.
class DeviceCopier {
 public:
  DeviceCopier() = default;
  ~DeviceCopier();
  DeviceCopier(const DeviceCopier&) = delete;
  DeviceCopier& operator=(const DeviceCopier&) = delete;

  // After `ready`.
  void ToHost(const ReadyEvent& ready, void* host, const void* device_pointer, size_t bytes);
  void ToDevice(int device, void* device_pointer, const void* host, size_t bytes);

 private:
  // With `device` the current one.
  void* StreamOf(int device);
  void ReleaseStream();

  int device_ = kCpu;
  void* stream_ = nullptr;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_DEVICE_DEVICE_H_
