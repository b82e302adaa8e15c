// A GPU of one worker, in time that a seed decides.
#ifndef BYTEPS_TESTS_SIMULATION_DEVICE_H_
#define BYTEPS_TESTS_SIMULATION_DEVICE_H_

#include <cstdint>
#include <functional>
#include <thread>

#include "byteps/device/device.h"

namespace byteps {
namespace core {
struct Stream;
}
namespace simulation {

constexpr int kGpu = 0;  // the only one

// Makes all that lives as long as the process.  Once, before anything is played.
void MakeGpu(uint64_t pinned_bytes, uint64_t streamed_bytes, uint64_t largest);

// The stream in which the worker computes.
core::DeviceStream UserStream();
// Gives it work.
void Compute(std::function<void()> work);

// Works for as long as it lives, and until nothing is left; within Run.
class Gpu {
 public:
  Gpu();
  ~Gpu();

  // Until all streams have done their work.
  void AwaitIdle();

 private:
  void Run();
  // A stream that has something to do; null: this is at its end.
  core::Stream* Next();

  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace simulation
}  // namespace byteps
#endif  // BYTEPS_TESTS_SIMULATION_DEVICE_H_
