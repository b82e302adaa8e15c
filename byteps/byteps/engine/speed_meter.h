#ifndef BYTEPS_ENGINE_SPEED_METER_H_
#define BYTEPS_ENGINE_SPEED_METER_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <utility>

#include "byteps/base/mutex.h"

namespace byteps {
namespace core {

// Measures the recent throughput of sums. Thread-safe.
class SpeedMeter {
 public:
  // Records a sum of `bytes` bytes that ended now.
  void Record(uint64_t bytes, std::chrono::steady_clock::time_point started) {
    const auto now = std::chrono::steady_clock::now();
    ps::MutexLock lock(&mu_);
    samples_.push_back({started, now, bytes});
    Forget(now);
  }

  // Returns the current time in ms since the epoch, and the throughput in MB/s. The throughput is
  // the number of bytes summed in the last 10 s, divided by the time since the oldest of these sums
  // started; 0 if there was no sum.
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
