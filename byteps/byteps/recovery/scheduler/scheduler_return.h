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

// Continues the job of a scheduler that died. It gathers the nodes of the job, which return to this
// scheduler with their accounts (docs/design/losses.md).
//
// Thread-safe.
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

  // Returns whether nodes are still returning.
  bool gathers() const;
  // Keeps a node's message until all nodes have returned. Returns false if the message need not
  // wait.
  bool HoldsBack(const Message& msg);
  // Forgets a returned node that was lost, and may return again. Returns false if no nodes return
  // now.
  bool Forget(int node_id);

  // ----- called without a lock

  // Admits a node that returns, with the account that it gives.
  void OnReturn(const Node& node, const membership::Claim& claim,
                const membership::Account& account);
  // Continues without nodes that have not returned in time.
  void OnBeat(Clock::time_point now);

 private:
  using Refusal = membership::Refusal;

  Refusal WhyRefused(const Node& node, const membership::Claim& claim,
                     const membership::Account& account) const PS_REQUIRES(job_->mu);
  // Removes and returns the nodes that must give up their ids to a returning node.
  std::vector<Node> MakeRoom(const Node& node, const membership::Account& account)
      PS_REQUIRES(job_->mu);
  // Continues the job if all nodes have returned. If `late`, continues it without missing nodes.
  void GoOn(bool late);
  // Returns the workers whose LEAVE message was held, if no other worker is still in the job. The
  // job is over then, and the missing nodes may have ended for that reason. Otherwise returns none.
  std::vector<Node> TakeLeavers(const std::vector<Message>& held, const std::vector<int>& missing)
      PS_REQUIRES(job_->mu);
  // Rebuilds the roster and the replicas from the accounts. Returns nodes that have returned but no
  // longer belong to the job.
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
  std::vector<Message> held_ PS_GUARDED_BY(job_->mu);  // see HoldsBack
};

}  // namespace ps
#endif  // BYTEPS_RECOVERY_SCHEDULER_SCHEDULER_RETURN_H_
