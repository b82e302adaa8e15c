#ifndef BYTEPS_RECOVERY_SCHEDULER_HELD_FAILURE_H_
#define BYTEPS_RECOVERY_SCHEDULER_HELD_FAILURE_H_

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "byteps/net/membership/scheduled_job.h"

namespace ps {

class SchedulerMembership;

// Failure of a worker that is reported while links to other nodes are broken. Perhaps one of these
// nodes ended first, and the worker failed because of that. So the scheduler decides which node was
// lost only when each of them is lost or connected again.
//
// Thread-safe.
class HeldFailure {
 public:
  using Clock = ScheduledJob::Clock;

  HeldFailure(SchedulerMembership* scheduler, ScheduledJob* job)
      : scheduler_(scheduler), job_(job) {}

  // ----- called with ScheduledJob::mu held

  // Returns whether the worker has reported its own failure.
  bool Includes(int worker) const;
  // Returns text about the held failure, to append to the reason why node `lost` is gone; "" if no
  // failure is held.
  std::string Then(int lost) const;
  Clock::time_point due() const;
  void Clear();

  // ----- called without a lock

  // Takes a worker's report of its failure, with the reason `what`. Returns false if the scheduler
  // can decide at once.
  bool Hold(int worker, const std::string& what);
  void Decide(Clock::time_point now);

 private:
  struct Failure {
    int worker = 0;  // the first worker that failed
    std::string what;
    std::set<int> failed;    // `worker`, and workers that failed later
    std::set<int> suspects;  // nodes whose links were broken when `worker` failed
    Clock::time_point due;   // time of the next check
    Clock::time_point latest;
  };

  // Returns the nodes with broken links, except those in `but`.
  std::vector<int> BrokenLinks(const std::set<int>& but) const;

  SchedulerMembership* const scheduler_;
  ScheduledJob* const job_;
  std::optional<Failure> held_ PS_GUARDED_BY(job_->mu);
};

}  // namespace ps
#endif  // BYTEPS_RECOVERY_SCHEDULER_HELD_FAILURE_H_
