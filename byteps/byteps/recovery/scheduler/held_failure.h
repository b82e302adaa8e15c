#ifndef BYTEPS_RECOVERY_SCHEDULER_HELD_FAILURE_H_
#define BYTEPS_RECOVERY_SCHEDULER_HELD_FAILURE_H_

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "byteps/net/membership/scheduled_job.h"

namespace ps {

class SchedulerMembership;

// The failure of a worker, while links with others are broken: one of these may have ended before,
// and this worker noticed. The verdict waits until they are lost or there again.
//
// Any thread.
class HeldFailure {
 public:
  using Clock = ScheduledJob::Clock;

  HeldFailure(SchedulerMembership* scheduler, ScheduledJob* job)
      : scheduler_(scheduler), job_(job) {}

  // ----- called with ScheduledJob::mu held

  // Whether the worker has said itself that it failed.
  bool Includes(int worker) const;
  // Follows the reason why the node `lost` is gone; empty: no failure is held.
  std::string Then(int lost) const;
  Clock::time_point due() const;
  void Clear();

  // ----- called without a lock

  // A worker says `what` became of it.  False: the verdict does not wait.
  bool Hold(int worker, const std::string& what);
  void Decide(Clock::time_point now);

 private:
  struct Failure {
    int worker = 0;  // the first that failed
    std::string what;
    std::set<int> failed;    // it, and others since
    std::set<int> suspects;  // whose links were broken when it failed
    Clock::time_point due;   // when to look again
    Clock::time_point latest;
  };

  // Nodes whose links are broken, `but` for some.
  std::vector<int> BrokenLinks(const std::set<int>& but) const;

  SchedulerMembership* const scheduler_;
  ScheduledJob* const job_;
  std::optional<Failure> held_ PS_GUARDED_BY(job_->mu);
};

}  // namespace ps
#endif  // BYTEPS_RECOVERY_SCHEDULER_HELD_FAILURE_H_
