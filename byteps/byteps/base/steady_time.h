// The clock that intervals are measured by.
#ifndef BYTEPS_BASE_STEADY_TIME_H_
#define BYTEPS_BASE_STEADY_TIME_H_

#include <chrono>
#include <cstdint>

namespace byteps {
namespace core {

// Nanoseconds since some moment that all processes of a host share.
inline int64_t SteadyNs() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_BASE_STEADY_TIME_H_
