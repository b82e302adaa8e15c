// Asks two GPUs for all of byteps/device/device.h; the fake driver says whether it was used well.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
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

// There and back, with `device` current.
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

// In a thread, with `mine` current as the caller's device (-1: none).
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
    core::Cuda();  // throws here what it would throw in the threads
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
