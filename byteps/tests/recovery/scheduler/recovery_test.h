// Fixtures: schedulers that continue a job after losses.
#ifndef BYTEPS_TESTS_RECOVERY_SCHEDULER_RECOVERY_TEST_H_
#define BYTEPS_TESTS_RECOVERY_SCHEDULER_RECOVERY_TEST_H_

#include "byteps/recovery/scheduler/make_roster_recovery.h"
#include "tests/net/membership/membership_test.h"

namespace ps {

class RecoveryTest : public SchedulerMembershipTest {
 protected:
  RecoveryTest() { policy_ = MakeRosterRecovery; }
};

class LostNeighborTest : public NeighborsTest {
 protected:
  LostNeighborTest() { policy_ = MakeRosterRecovery; }
};

}  // namespace ps

#endif  // BYTEPS_TESTS_RECOVERY_SCHEDULER_RECOVERY_TEST_H_
