#ifndef BYTEPS_NET_LINK_LINK_RATE_H_
#define BYTEPS_NET_LINK_LINK_RATE_H_

#include <cstddef>
#include <cstdint>

namespace ps {

// Rate at which the peer takes bytes. It is measured only while at least kBusyBytes are in flight,
// because the peer acknowledges at once only then. Times are in ns of any clock. Not thread-safe.
class LinkRate {
 public:
  // Takes note of `arrived` newly acknowledged bytes, and of `in_flight` unacknowledged bytes.
  void Update(size_t in_flight, size_t arrived, int64_t now) {
    if (is_busy_) {
      bytes_ += arrived;
      busy_ns_ += now - since_;
    }
    if (bytes_ >= kSpanBytes && busy_ns_ > 0) {
      const double rate = static_cast<double>(bytes_) / static_cast<double>(busy_ns_);
      bytes_per_ns_ += (bytes_per_ns_ > 0 ? kWeight : 1.0) * (rate - bytes_per_ns_);
      bytes_ = 0;
      busy_ns_ = 0;
    }
    since_ = now;
    is_busy_ = in_flight >= kBusyBytes;
  }

  // Returns the rate, or 0 while it is unknown.
  double bytes_per_ns() const { return bytes_per_ns_; }

 private:
  static constexpr size_t kBusyBytes = 64 << 10;  // equals Receipts::kManyBytes
  static constexpr size_t kSpanBytes = 512 << 10;
  static constexpr double kWeight = 0.25;

  bool is_busy_ = false;
  int64_t since_ = 0;
  size_t bytes_ = 0;
  int64_t busy_ns_ = 0;
  double bytes_per_ns_ = 0;
};

}  // namespace ps
#endif  // BYTEPS_NET_LINK_LINK_RATE_H_
