// A GPU by CUDA's driver, which is found at run time.
#include <dlfcn.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/mutex.h"
#include "byteps/device/device.h"

namespace byteps {
namespace core {

// The driver's interface, not the run-time library's: a driver keeps the functions of all
// drivers before it, so that one build serves CUDA 12 and 13.  A run-time library has one
// number; linked in, it refuses older drivers, and shared with torch, its name changes with
// every major version.  Both interfaces act on the same contexts, streams and events.

namespace {

constexpr char kLibrary[] = "libcuda.so.1";

struct Loaded {
  CudaApi api = {};
  std::string error;  // empty: `api` is whole
};

// "out of memory (CUDA_ERROR_OUT_OF_MEMORY)"
std::string Describe(const CudaApi& api, CudaResult error) {
  const char* text = nullptr;
  const char* name = nullptr;
  api.cuGetErrorString(error, &text);
  api.cuGetErrorName(error, &name);
  return std::string(text != nullptr ? text : "unknown error") + " (" +
         (name != nullptr ? name : "CUDA error " + std::to_string(error)) + ")";
}

Loaded Load() {
  Loaded loaded;
  // Never closed: the driver has threads and exit handlers of its own.
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    loaded.error = std::string(
                       "GPU tensors need the NVIDIA driver's library, which cannot be "
                       "loaded: ") +
                   (reason != nullptr ? reason : kLibrary);
    return loaded;
  }
  auto find = [&](auto* function, const char* symbol) {
    void* address = dlsym(library, symbol);
    if (address == nullptr && loaded.error.empty()) {
      loaded.error = std::string(kLibrary) + " has no " + symbol +
                     ": the NVIDIA driver is too old; install one that your torch supports";
    }
    *reinterpret_cast<void**>(function) = address;
  };
  CudaApi* api = &loaded.api;
  find(&api->cuInit, "cuInit");
  find(&api->cuGetErrorName, "cuGetErrorName");
  find(&api->cuGetErrorString, "cuGetErrorString");
  find(&api->cuDeviceGet, "cuDeviceGet");
  find(&api->cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  find(&api->cuCtxPushCurrent, "cuCtxPushCurrent_v2");
  find(&api->cuCtxPopCurrent, "cuCtxPopCurrent_v2");
  find(&api->cuMemHostAlloc, "cuMemHostAlloc");
  find(&api->cuEventCreate, "cuEventCreate");
  find(&api->cuEventRecord, "cuEventRecord");
  find(&api->cuEventQuery, "cuEventQuery");
  find(&api->cuStreamCreate, "cuStreamCreate");
  find(&api->cuStreamQuery, "cuStreamQuery");
  find(&api->cuStreamWaitEvent, "cuStreamWaitEvent");
  find(&api->cuStreamWaitValue32, "cuStreamWaitValue32_v2");
  find(&api->cuLaunchHostFunc, "cuLaunchHostFunc");
  find(&api->cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2");
  find(&api->cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2");
  if (!loaded.error.empty()) return loaded;
  const CudaResult result = api->cuInit(0);
  if (result != kCudaSuccess) loaded.error = "cuInit: " + Describe(*api, result);
  return loaded;
}

// The device's primary context, retained once and kept until the process ends, as the
// run-time library does.
CudaContext PrimaryContext(int device) {
  static ps::Mutex mu;
  static std::vector<CudaContext> contexts;  // by device
  ps::MutexLock lock(&mu);
  const auto index = static_cast<size_t>(device);
  if (index >= contexts.size()) contexts.resize(index + 1);
  if (contexts[index] == nullptr) {
    CudaDevice handle = 0;
    CheckCuda(Cuda().cuDeviceGet(&handle, device), "cuDeviceGet");
    CheckCuda(Cuda().cuDevicePrimaryCtxRetain(&contexts[index], handle),
              "cuDevicePrimaryCtxRetain");
  }
  return contexts[index];
}

}  // namespace

const CudaApi& Cuda() {
  static const Loaded loaded = Load();
  if (!loaded.error.empty()) throw Error(loaded.error);
  return loaded.api;
}

void CheckCuda(CudaResult result, const char* what) {
  if (result == kCudaSuccess) return;
  throw Error(std::string(what) + ": " + Describe(Cuda(), result));
}

void PushCudaDevice(int device) {
  CheckCuda(Cuda().cuCtxPushCurrent(PrimaryContext(device)), "cuCtxPushCurrent");
}

void PopCudaDevice() {
  CudaContext ours = nullptr;
  (void)Cuda().cuCtxPopCurrent(&ours);  // an error means that the driver is gone, at exit
}

namespace {

CudaStream Stream(DeviceStream stream) { return static_cast<CudaStream>(stream); }
CudaEvent Event(DeviceEvent event) { return static_cast<CudaEvent>(event); }
CudaPointer Pointer(const void* memory) { return reinterpret_cast<CudaPointer>(memory); }

// Of what a query says.
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
  (void)function.release();  // CallAndDelete's now
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
