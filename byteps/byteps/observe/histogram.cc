#include "byteps/observe/histogram.h"

#include <algorithm>

namespace byteps {
namespace core {

void Histogram::Observe(int64_t nanoseconds) {
  const double seconds = static_cast<double>(nanoseconds) * 1e-9;
  const auto bound = std::lower_bound(kBounds.begin(), kBounds.end(), seconds);
  buckets_[bound - kBounds.begin()].Add();
  sum_.Add(nanoseconds);
}

Histogram::Reading Histogram::Read() const {
  Reading reading;
  for (const auto& bucket : buckets_) {
    reading.count += bucket.Get();
    reading.cumulative.push_back(reading.count);
  }
  reading.cumulative.pop_back();
  reading.sum = static_cast<double>(sum_.Get()) * 1e-9;
  return reading;
}

}  // namespace core
}  // namespace byteps
