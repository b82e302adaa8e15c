#ifndef BYTEPS_OBSERVE_COUNTER_H_
#define BYTEPS_OBSERVE_COUNTER_H_

#include <atomic>
#include <cstdint>

namespace byteps {
namespace core {

// A number that only increases.
//
// Counting is a relaxed addition to an atomic, in any thread, so the numbers of a reading may be a
// few operations apart. The sizes of queues are not counted, but read on request. The tables in
// metrics.cc list all metrics. Prometheus, bps.get_metrics() and the documentation are generated
// from them.
class Counter {
 public:
  void Add(uint64_t n = 1) { value_.fetch_add(n, std::memory_order_relaxed); }
  uint64_t Get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_OBSERVE_COUNTER_H_
