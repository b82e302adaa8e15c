#ifndef BYTEPS_DEVICE_CUDA_API_H_
#define BYTEPS_DEVICE_CUDA_API_H_

#include <cstddef>

namespace byteps {
namespace core {

struct CudaContextObject;
struct CudaStreamObject;
struct CudaEventObject;

// Types of CUDA's driver, as in its binary interface, so that building needs no CUDA header.
using CudaResult = int;  // 0: success
using CudaDevice = int;
using CudaPointer = unsigned long long;  // address in a GPU's memory
using CudaContext = CudaContextObject*;
using CudaStream = CudaStreamObject*;  // the same object as a cudaStream_t
using CudaEvent = CudaEventObject*;    // the same object as a cudaEvent_t

constexpr CudaResult kCudaSuccess = 0;
constexpr CudaResult kCudaNotReady = 600;
constexpr unsigned kCudaHostAllocPortable = 1;
constexpr unsigned kCudaEventDisableTiming = 2;
constexpr unsigned kCudaStreamNonBlocking = 1;
constexpr unsigned kCudaWaitValueEqual = 1;

// Driver functions that the engine calls. They are loaded at run time, and all members are set. The
// names lack the version suffix of the binary interface, such as _v2. This table fixes the
// versions, so one build serves every driver.
struct CudaApi {
  CudaResult (*cuInit)(unsigned flags);
  CudaResult (*cuGetErrorName)(CudaResult error, const char** text);
  CudaResult (*cuGetErrorString)(CudaResult error, const char** text);
  CudaResult (*cuDeviceGet)(CudaDevice* device, int ordinal);
  CudaResult (*cuDevicePrimaryCtxRetain)(CudaContext* context, CudaDevice device);
  CudaResult (*cuCtxPushCurrent)(CudaContext context);
  CudaResult (*cuCtxPopCurrent)(CudaContext* context);
  CudaResult (*cuMemHostAlloc)(void** memory, size_t bytes, unsigned flags);
  CudaResult (*cuEventCreate)(CudaEvent* event, unsigned flags);
  CudaResult (*cuEventRecord)(CudaEvent event, CudaStream stream);
  CudaResult (*cuEventQuery)(CudaEvent event);
  CudaResult (*cuStreamCreate)(CudaStream* stream, unsigned flags);
  CudaResult (*cuStreamQuery)(CudaStream stream);
  CudaResult (*cuStreamWaitEvent)(CudaStream stream, CudaEvent event, unsigned flags);
  CudaResult (*cuStreamWaitValue32)(CudaStream stream, CudaPointer word, unsigned value,
                                    unsigned flags);
  CudaResult (*cuLaunchHostFunc)(CudaStream stream, void (*function)(void* data), void* data);
  CudaResult (*cuMemcpyDtoHAsync)(void* host, CudaPointer device, size_t bytes, CudaStream stream);
  CudaResult (*cuMemcpyHtoDAsync)(CudaPointer device, const void* host, size_t bytes,
                                  CudaStream stream);
};

// Loads libcuda.so.1 and initializes the driver, once per process. Throws Error that says what is
// missing: the library, a function (the driver is too old), or a GPU. A failure is final: later
// calls throw the same. Thread-safe.
const CudaApi& Cuda();

// Throws Error if `result` is not a success. The text is `what`, then the driver's description and
// error name (CUDA_ERROR_...).
void CheckCuda(CudaResult result, const char* what);

// Makes the primary context of `device`, which torch uses, too, current in the calling thread.
// `device` is torch's number, among CUDA_VISIBLE_DEVICES. Throws Error.
void PushCudaDevice(int device);
// Restores the previous context.
void PopCudaDevice();

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_DEVICE_CUDA_API_H_
