// One process of the job.
#ifndef PS_TESTS_VAN_TEST_NODE_H_
#define PS_TESTS_VAN_TEST_NODE_H_

#include <string>

namespace van_test {

// Plays a role to its end, and says what became of it; 0: as a job should end.  The scheduler
// writes the port at which it listens into `port_pipe`; others are given it, and -1.
int RunNode(const std::string& role, int rank, int port, int port_pipe);

}  // namespace van_test
#endif  // PS_TESTS_VAN_TEST_NODE_H_
