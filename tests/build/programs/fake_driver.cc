// A driver of two GPUs whose memory is the host's.  As strict as the real one about what must be
// current, and it counts what was made and not given back.  Built without some functions
// (-DWITHOUT_...) it stands for an old driver.
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
int live_objects = 0;

Context* Current() { return current.empty() ? nullptr : current.back(); }

int Make(void** object) {
  if (Current() == nullptr) return kInvalidContext;
  *object = new OfContext{Current()};
  ++live_objects;
  return 0;
}

int Destroy(void* object) {
  if (Current() == nullptr) return kInvalidContext;
  delete static_cast<OfContext*>(object);
  --live_objects;
  return 0;
}

// Of the current context, as a stream and an event of one call must be.
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

int fake_live_objects() { return live_objects; }
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
  ++live_objects;
  return 0;
}
int cuMemFreeHost(void* memory) {
  if (Current() == nullptr) return kInvalidContext;
  free(memory);
  --live_objects;
  return 0;
}
int cuEventCreate(void** event, unsigned) { return Make(event); }
int cuEventDestroy_v2(void* event) { return Destroy(event); }
int cuEventRecord(void* event, void* stream) {
  if (int error = Check(event)) return error;
  return Check(stream);
}
int cuEventQuery(void*) { return 0; }
int cuEventSynchronize(void*) { return 0; }
int cuStreamCreate(void** stream, unsigned) { return Make(stream); }
int cuStreamDestroy_v2(void* stream) { return Destroy(stream); }
// Events may be waited for across contexts.
int cuStreamWaitEvent(void* stream, void*, unsigned) { return Check(stream); }
int cuStreamSynchronize(void* stream) { return Check(stream); }
#ifndef WITHOUT_COPIES
int cuMemcpyDtoHAsync_v2(void* host, unsigned long long device, size_t bytes, void* stream) {
  return Copy(host, reinterpret_cast<const void*>(device), bytes, stream);
}
int cuMemcpyHtoDAsync_v2(unsigned long long device, const void* host, size_t bytes, void* stream) {
  return Copy(reinterpret_cast<void*>(device), host, bytes, stream);
}
#endif

}  // extern "C"
