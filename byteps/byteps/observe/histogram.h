#ifndef BYTEPS_OBSERVE_HISTOGRAM_H_
#define BYTEPS_OBSERVE_HISTOGRAM_H_

#include <array>
#include <cstdint>
#include <vector>

#include "byteps/observe/counter.h"

namespace byteps {
namespace core {

// Distribution of durations.
class Histogram {
 public:
  // Upper limits of the buckets, in seconds; another bucket has no limit.
  static constexpr std::array<double, 16> kBounds = {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005,
                                                     0.01,   0.025,   0.05,   0.1,   0.25,   0.5,
                                                     1,      2.5,     5,      10};

  struct Reading {
    std::vector<uint64_t> cumulative;  // at most kBounds[i] seconds
    uint64_t count = 0;
    double sum = 0;  // in seconds
  };

  void Observe(int64_t nanoseconds);
  Reading Read() const;

 private:
  std::array<Counter, kBounds.size() + 1> buckets_;
  Counter sum_;  // in nanoseconds
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_OBSERVE_HISTOGRAM_H_
