// What a process has of the machine.
#ifndef BYTEPS_TESTS_NET_VAN_TEST_RESOURCES_H_
#define BYTEPS_TESTS_NET_VAN_TEST_RESOURCES_H_

#include <string>

namespace van_test {

// What the kernel says of this process: pinned and resident KiB, and open files.
std::string Resources();

}  // namespace van_test
#endif  // BYTEPS_TESTS_NET_VAN_TEST_RESOURCES_H_
