#ifndef BYTEPS_DEVICE_CUDA_API_H_
#define BYTEPS_DEVICE_CUDA_API_H_

#include <cstddef>

namespace byteps {
namespace core {

struct CudaContextObject;
struct CudaStreamObject;
struct CudaEventObject;

// The part of CUDA's driver interface that the engine calls, found at run time.

// Driver types as its binary interface has them, so that no CUDA header is needed to build.
using CudaResult = int;  // 0: success
using CudaDevice = int;
using CudaPointer = unsigned long long;  // an address in a GPU's memory
using CudaContext = CudaContextObject*;
using CudaStream = CudaStreamObject*;  // the same object as a cudaStream_t
using CudaEvent = CudaEventObject*;    // the same object as a cudaEvent_t

constexpr CudaResult kCudaSuccess = 0;
constexpr CudaResult kCudaNotReady = 600;
constexpr unsigned kCudaHostAllocPortable = 1;
constexpr unsigned kCudaEventDisableTiming = 2;
constexpr unsigned kCudaStreamNonBlocking = 1;
constexpr unsigned kCudaWaitValueEqual = 1;

// Every member is set.  The names are the driver's own, without the suffix of the binary
// interface's version, such as _v2, which this table fixes: one build serves every driver.
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

// Loads libcuda.so.1, once for the process, and initializes the driver.  Thread-safe.
// Throws Error that says what is missing: the library, a function of it (its driver is too
// old), or a GPU.  A failure is final: the next call throws the same.
const CudaApi& Cuda();

// Throws Error "`what`: the driver's words (CUDA_ERROR_...)" unless `result` is a success.
void CheckCuda(CudaResult result, const char* what);

// Makes `device`'s primary context, which is torch's too, the calling thread's current one.
// `device` counts as torch does, among CUDA_VISIBLE_DEVICES.  Throws Error.
void PushCudaDevice(int device);
// Brings back the one before.
void PopCudaDevice();

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_DEVICE_CUDA_API_H_
