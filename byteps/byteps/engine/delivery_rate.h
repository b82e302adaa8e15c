#ifndef BYTEPS_ENGINE_DELIVERY_RATE_H_
#define BYTEPS_ENGINE_DELIVERY_RATE_H_

#include <algorithm>
#include <cstdint>
#include <optional>

namespace byteps {
namespace core {

// Measures the rate at which servers receive what a worker pushes.
//
// The result is the highest recent rate, because link and servers can sustain it. The rate decays
// by half within some seconds, but only while partitions wait to be pushed: otherwise a low rate
// says nothing about the link. Times are in ns of any clock. Not thread-safe.
class DeliveryRate {
 public:
  // Starts a measurement, because bytes are in flight now, and none were before.
  void Begin(int64_t now) {
    begin_ = now;
    bytes_ = 0;
    always_waited_ = true;
  }

  // Records the arrival of `bytes`. `more_wait`: whether other partitions waited for room in a
  // window.
  void Add(uint64_t bytes, bool more_wait, int64_t now) {
    bytes_ += bytes;
    always_waited_ &= more_wait;
    if (now - begin_ < kSpanNs) return;
    const double rate = static_cast<double>(bytes_) / static_cast<double>(now - begin_);
    const double kept = always_waited_ ? kKept : 1.0;
    if (rate_ || always_waited_) rate_ = std::max(rate, kept * rate_.value_or(0.0));
    Begin(now);
  }

  // Returns the number of bytes that arrive in `ns` nanoseconds, or nothing while the rate is
  // unknown.
  std::optional<uint64_t> BytesIn(int64_t ns) const {
    if (!rate_) return std::nullopt;
    return static_cast<uint64_t>(*rate_ * static_cast<double>(ns));
  }

 private:
  // Shortest time over which a rate is measured. It is far longer than a server needs to
  // acknowledge.
  static constexpr int64_t kSpanNs = 20'000'000;
  static constexpr double kKept = 0.99;

  int64_t begin_ = 0;
  uint64_t bytes_ = 0;
  bool always_waited_ = true;
  std::optional<double> rate_;  // bytes per ns
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_DELIVERY_RATE_H_
