#include "byteps/device/cuda_api.h"

#include <dlfcn.h>

#include <string>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/mutex.h"

namespace byteps {
namespace core {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";

struct Loaded {
  CudaApi api = {};
  std::string error;  // "": `api` is complete
};

// Returns "out of memory (CUDA_ERROR_OUT_OF_MEMORY)".
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
  // The library is never closed, because the driver has threads and exit handlers.
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

// Returns the device's primary context. It is retained once until the process ends, as the run-time
// library does.
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
  // At the end of the process, an error means that the driver is gone.
  (void)Cuda().cuCtxPopCurrent(&ours);
}

}  // namespace core
}  // namespace byteps
