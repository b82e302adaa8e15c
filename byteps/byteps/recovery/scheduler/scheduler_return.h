#ifndef BYTEPS_RECOVERY_SCHEDULER_SCHEDULER_RETURN_H_
#define BYTEPS_RECOVERY_SCHEDULER_SCHEDULER_RETURN_H_

#include <set>
#include <vector>

#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/refusal.h"
#include "byteps/net/membership/roster.h"
#include "byteps/net/membership/scheduled_job.h"
#include "byteps/net/membership/words.h"
#include "byteps/recovery/scheduler/accounts.h"
#include "byteps/recovery/scheduler/leavers.h"
#include "byteps/recovery/scheduler/replica_table.h"
#include "byteps/recovery/scheduler/replicas.h"
#include "byteps/recovery/scheduler/server_places.h"
#include "ps/internal/message.h"

namespace ps {

class SchedulerMembership;

// Goes on with the job of a scheduler that died, from what nodes tell of it
// (docs/design/losses.md).
//
// Any thread.
class SchedulerReturn {
 public:
  using Clock = ScheduledJob::Clock;

  SchedulerReturn(SchedulerMembership* scheduler, ScheduledJob* job, ReplicaTable* table,
                  ServerPlaces* places, Replicas* replicas, Leavers* leavers)
      : scheduler_(scheduler),
        job_(job),
        table_(table),
        places_(places),
        replicas_(replicas),
        leavers_(leavers) {}

  // ----- called with ScheduledJob::mu held

  // Whether nodes are still to come.
  bool gathers() const;
  // Keeps a node's message until the others have come; false: it need not wait.
  bool HoldsBack(const Message& msg);
  // A node that has come is lost, and may come again.  False: nodes do not gather.
  bool Forget(int node_id);

  // ----- called without a lock

  // A node comes back.
  void OnReturn(const Node& node, const membership::Claim& claim,
                const membership::Account& account);
  // Waits no longer for those that have not come in time.
  void OnBeat(Clock::time_point now);

 private:
  using Refusal = membership::Refusal;

  Refusal WhyRefused(const Node& node, const membership::Claim& claim,
                     const membership::Account& account) const PS_REQUIRES(job_->mu);
  // Removes and returns the nodes that have to go, since this node returns.
  std::vector<Node> MakeRoom(const Node& node, const membership::Account& account)
      PS_REQUIRES(job_->mu);
  // All have come, or it is too late for those that have not.
  void GoOn(bool late);
  // The workers whose LEAVE was held back, if no other worker stays: then the job is over, and a
  // node that has not come may have heard so.  Else none.
  std::vector<Node> TakeLeavers(const std::vector<Message>& held, const std::vector<int>& missing)
      PS_REQUIRES(job_->mu);
  // Makes the roster and the replicas of what was told.  The nodes that are of them no more.
  std::vector<Node> Rebuild(const std::vector<int>& missing) PS_REQUIRES(job_->mu);

  SchedulerMembership* const scheduler_;
  ScheduledJob* const job_;
  ReplicaTable* const table_ PS_PT_GUARDED_BY(job_->mu);
  ServerPlaces* const places_;
  Replicas* const replicas_;
  Leavers* const leavers_;
  bool gathers_ PS_GUARDED_BY(job_->mu) = false;
  Clock::time_point since_ PS_GUARDED_BY(job_->mu);
  JobSize size_ PS_GUARDED_BY(job_->mu);
  membership::Accounts accounts_ PS_GUARDED_BY(job_->mu);
  std::vector<Message> held_ PS_GUARDED_BY(job_->mu);  // that nodes sent meanwhile
};

}  // namespace ps
#endif  // BYTEPS_RECOVERY_SCHEDULER_SCHEDULER_RETURN_H_
