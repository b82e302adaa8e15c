// What a process tells of itself.
#ifndef PS_TESTS_VAN_TEST_FIGURES_H_
#define PS_TESTS_VAN_TEST_FIGURES_H_

#include <cstdint>
#include <string>
#include <vector>

namespace van_test {

// What the kernel says of this process: pinned and resident KiB, and open files.
std::string Resources();

// A line for each endpoint, with what went through it.
std::vector<std::string> EndpointLines();

std::string SpeedLine(uint64_t bytes, double seconds);

// Of the times in seconds that pings took, which are sorted.
std::string DelayLine(std::vector<double>* delays);

}  // namespace van_test
#endif  // PS_TESTS_VAN_TEST_FIGURES_H_
