#include "byteps/recovery/scheduler/make_roster_recovery.h"

#include "byteps/recovery/scheduler/roster_recovery.h"

namespace ps {

std::unique_ptr<RosterPolicy> MakeRosterRecovery(SchedulerMembership* scheduler,
                                                 ScheduledJob* job) {
  return std::make_unique<RosterRecovery>(scheduler, job);
}

}  // namespace ps
