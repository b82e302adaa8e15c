// Copies from and to two GPUs through byteps/device; the fake driver says whether it was used well.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "byteps/base/error.h"
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

// In the thread of a copier, with `mine` current as the caller's device (-1: none).
void Work(int mine) {
  std::unique_ptr<core::CudaDeviceScope> callers;
  if (mine >= 0) callers = std::make_unique<core::CudaDeviceScope>(mine);
  {
    core::DeviceCopier copier;
    for (int round = 0; round < 4; ++round) {
      const int device = round % 2;
      std::vector<char> on_device(1000, static_cast<char>('a' + round));
      core::StagingBuffer staging(device, on_device.size());
      core::ReadyEvent ready(device, nullptr);
      copier.ToHost(ready, staging.data(), on_device.data(), on_device.size());
      Expect(memcmp(staging.data(), on_device.data(), on_device.size()) == 0, "copy to the host");
      memset(staging.data(), 'z', on_device.size());
      copier.ToDevice(device, on_device.data(), staging.data(), on_device.size());
      Expect(on_device == std::vector<char>(1000, 'z'), "copy to the device");
      Expect(Ask("fake_current_device") == mine, "the caller's device is current again");
    }
  }
  Expect(Ask("fake_current_device") == mine, "the caller's device is current at the end");
  callers.reset();
  Expect(Ask("fake_depth") == 0, "nothing stays current");
}

int main() {
  try {
    core::Cuda();  // throws here what it would throw in the threads
    for (int mine : {-1, 0, 1}) std::thread(Work, mine).join();
    Expect(Ask("fake_live_objects") == 0, "everything was given back");
    for (int wrong : {0, 2}) {
      try {
        core::StagingBuffer buffer(wrong, size_t{1} << 41);
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
