// Calls every function of byteps/device/device.h for two GPUs. The fake driver checks the calls.
// Compiled with -DFAKE_DRIVER, this file is that driver.
#ifndef FAKE_DRIVER
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/device/cuda_api.h"
#include "byteps/device/device.h"

namespace core = byteps::core;

int failures = 0;

void Expect(bool good, const char* what) {
  if (good) return;
  printf("wrong: %s\n", what);
  ++failures;
}

int Ask(const char* function) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<int (*)()>(dlsym(driver, function))();
}

// Copies to the GPU and back, with `device` current.
void CopyOn(int device, char letter) {
  const core::CurrentDevice current(device);
  Expect(Ask("fake_current_device") == device, "the device is current");
  std::vector<char> on_device(1000, letter);
  const core::DeviceStream stream = core::MakeStream();
  const core::DeviceStream other = core::MakeStream();
  const core::DeviceEvent event = core::MakeEvent();
  auto* pinned = static_cast<char*>(core::PinMemory(on_device.size()));
  core::RecordEvent(event, nullptr);  // the caller's default stream
  core::WaitForEvent(stream, event);
  core::CopyToHost(pinned, on_device.data(), on_device.size(), stream);
  Expect(memcmp(pinned, on_device.data(), on_device.size()) == 0, "copy to the host");
  memset(pinned, 'z', on_device.size());
  core::CopyToDevice(on_device.data(), pinned, on_device.size(), stream);
  Expect(on_device == std::vector<char>(1000, 'z'), "copy to the device");
  core::RecordEvent(event, stream);
  core::WaitForEvent(other, event);
  auto* word = new (core::PinMemory(sizeof(core::DeviceWord))) core::DeviceWord(1);
  core::WaitForWord(other, word);
  bool called = false;
  core::CallWhenDone(other, [&called] { called = true; });
  Expect(called, "what was to be called when it was done");
  Expect(core::EventIsDone(event), "the end of the work");
  Expect(core::StreamIsIdle(stream), "that nothing is left to do");
}

// Runs in a thread, with `mine` current as the caller's device (-1: none).
void Work(int mine) {
  if (mine >= 0) core::PushCudaDevice(mine);
  for (int round = 0; round < 4; ++round) {
    CopyOn(round % 2, static_cast<char>('a' + round));
    Expect(Ask("fake_current_device") == mine, "the caller's device is current again");
  }
  if (mine >= 0) core::PopCudaDevice();
  Expect(Ask("fake_depth") == 0, "nothing stays current");
}

int main() {
  try {
    core::Cuda();  // throws here what it would throw in a thread
    for (int mine : {-1, 0, 1}) std::thread(Work, mine).join();
    for (int wrong : {0, 2}) {
      try {
        const core::CurrentDevice current(wrong);
        (void)core::PinMemory(size_t{1} << 41);
        Expect(false, "an error");
      } catch (const core::Error& e) {
        printf("error: %s\n", e.what());
      }
    }
  } catch (const core::Error& e) {
    printf("error: %s\n", e.what());
    return 1;
  }
  return failures == 0 ? 0 : 3;
}

#else

// A fake CUDA driver with two GPUs. Their memory is host memory, and each call does its work before
// it returns. Like the real driver it demands the right current context. -DWITHOUT_... leaves out
// functions that an old driver lacks.
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;
constexpr int kNoDevice = 100;
constexpr int kInvalidDevice = 101;
constexpr int kInvalidContext = 201;

struct Context {
  int device;
};
struct OfContext {
  Context* context;
};

Context primary[2] = {{0}, {1}};
thread_local std::vector<Context*> current;

Context* Current() { return current.empty() ? nullptr : current.back(); }

int Make(void** object) {
  if (Current() == nullptr) return kInvalidContext;
  *object = new OfContext{Current()};
  return 0;
}

// Checks the current context, which the stream and event of a call must share.
int Check(void* object) {
  if (Current() == nullptr) return kInvalidContext;
  return object == nullptr || static_cast<OfContext*>(object)->context == Current() ? 0
                                                                                    : kInvalidValue;
}

int Copy(void* to, const void* from, size_t bytes, void* stream) {
  if (int error = Check(stream)) return error;
  memcpy(to, from, bytes);
  return 0;
}

}  // namespace

extern "C" {

int fake_depth() { return static_cast<int>(current.size()); }
int fake_current_device() { return Current() == nullptr ? -1 : Current()->device; }

int cuInit(unsigned) { return getenv("FAKE_NO_GPU") != nullptr ? kNoDevice : 0; }
int cuGetErrorName(int error, const char** text) {
  *text = error == kNoDevice      ? "CUDA_ERROR_NO_DEVICE"
          : error == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY"
                                  : "CUDA_ERROR_OTHER";
  return 0;
}
int cuGetErrorString(int error, const char** text) {
  *text = error == kNoDevice      ? "no CUDA-capable device is detected"
          : error == kOutOfMemory ? "out of memory"
                                  : "other";
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  if (ordinal < 0 || ordinal > 1) return kInvalidDevice;
  *device = ordinal;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &primary[device];
  return 0;
}
int cuCtxPushCurrent_v2(void* context) {
  current.push_back(static_cast<Context*>(context));
  return 0;
}
int cuCtxPopCurrent_v2(void** context) {
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return 0;
}
int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  if (Current() == nullptr) return kInvalidContext;
  if (bytes > (size_t{1} << 40)) return kOutOfMemory;
  *memory = malloc(bytes);
  return 0;
}
int cuEventCreate(void** event, unsigned) { return Make(event); }
int cuEventRecord(void* event, void* stream) {
  if (int error = Check(event)) return error;
  return Check(stream);
}
int cuEventQuery(void*) { return 0; }
int cuStreamCreate(void** stream, unsigned) { return Make(stream); }
int cuStreamQuery(void* stream) { return Check(stream); }
// A stream may wait for an event of another context.
int cuStreamWaitEvent(void* stream, void*, unsigned) { return Check(stream); }
// The stream does its work at once, so the word must be set already.
int cuStreamWaitValue32_v2(void* stream, unsigned long long word, unsigned value, unsigned flags) {
  constexpr unsigned kEqual = 1;
  if (int error = Check(stream)) return error;
  const bool is_set = *reinterpret_cast<const unsigned*>(word) == value;
  return is_set && flags == kEqual ? 0 : kInvalidValue;
}
int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  if (int error = Check(stream)) return error;
  function(data);
  return 0;
}
#ifndef WITHOUT_COPIES
int cuMemcpyDtoHAsync_v2(void* host, unsigned long long device, size_t bytes, void* stream) {
  return Copy(host, reinterpret_cast<const void*>(device), bytes, stream);
}
int cuMemcpyHtoDAsync_v2(unsigned long long device, const void* host, size_t bytes, void* stream) {
  return Copy(reinterpret_cast<void*>(device), host, bytes, stream);
}
#endif

}  // extern "C"

#endif  // FAKE_DRIVER
