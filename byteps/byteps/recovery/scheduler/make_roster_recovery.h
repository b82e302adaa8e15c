#ifndef BYTEPS_RECOVERY_SCHEDULER_MAKE_ROSTER_RECOVERY_H_
#define BYTEPS_RECOVERY_SCHEDULER_MAKE_ROSTER_RECOVERY_H_

#include <memory>

namespace ps {

class RosterPolicy;
struct ScheduledJob;
class SchedulerMembership;

// Makes a RosterRecovery, for callers that do not include its messages.
std::unique_ptr<RosterPolicy> MakeRosterRecovery(SchedulerMembership* scheduler, ScheduledJob* job);

}  // namespace ps
#endif  // BYTEPS_RECOVERY_SCHEDULER_MAKE_ROSTER_RECOVERY_H_
