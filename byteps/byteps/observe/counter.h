#ifndef BYTEPS_OBSERVE_COUNTER_H_
#define BYTEPS_OBSERVE_COUNTER_H_

#include <atomic>
#include <cstdint>

namespace byteps {
namespace core {

// What a worker and a server count, and the names under which they tell it.
//
// Counting is an addition to an atomic, in any thread and with no lock; the figures of
// one reading may be a few operations apart.  What a queue holds is not counted but
// looked up when somebody asks.  The tables in metrics.cc are the one list of metrics:
// Prometheus, bps.get_metrics() and the documentation are made from them.
//
// A number that only grows.
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
