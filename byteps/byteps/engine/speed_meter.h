#ifndef BYTEPS_ENGINE_SPEED_METER_H_
#define BYTEPS_ENGINE_SPEED_METER_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <utility>

#include "byteps/base/mutex.h"

namespace byteps {
namespace core {

// How fast tensors were summed lately.
//
// Thread-safe.
class SpeedMeter {
 public:
  // `bytes` of tensors were summed just now, which took since `started`.
  void Record(uint64_t bytes, std::chrono::steady_clock::time_point started) {
    const auto now = std::chrono::steady_clock::now();
    ps::MutexLock lock(&mu_);
    samples_.push_back({started, now, bytes});
    Forget(now);
  }

  // (ms since the epoch, MB/s: tensor bytes per second from the start of the oldest
  // operation of the last 10 s until now); 0 MB/s when there was none.
  std::pair<uint64_t, double> Get() {
    const auto now = std::chrono::steady_clock::now();
    ps::MutexLock lock(&mu_);
    Forget(now);
    uint64_t bytes = 0;
    auto first = now;
    for (const auto& sample : samples_) {
      bytes += sample.bytes;
      if (sample.started < first) first = sample.started;
    }
    const double seconds = std::chrono::duration<double>(now - first).count();
    const auto epoch = std::chrono::system_clock::now().time_since_epoch();
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(epoch).count();
    return {static_cast<uint64_t>(ms), seconds > 0 ? bytes / 1e6 / seconds : 0.0};
  }

 private:
  struct Sample {
    std::chrono::steady_clock::time_point started;
    std::chrono::steady_clock::time_point finished;
    uint64_t bytes;
  };

  void Forget(std::chrono::steady_clock::time_point now) PS_REQUIRES(mu_) {
    while (!samples_.empty() && now - samples_.front().finished > std::chrono::seconds(10)) {
      samples_.pop_front();
    }
  }

  ps::Mutex mu_;
  std::deque<Sample> samples_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_SPEED_METER_H_
