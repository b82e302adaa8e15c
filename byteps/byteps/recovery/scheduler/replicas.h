#ifndef BYTEPS_RECOVERY_SCHEDULER_REPLICAS_H_
#define BYTEPS_RECOVERY_SCHEDULER_REPLICAS_H_

#include <string>
#include <vector>

#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/refusal.h"
#include "byteps/net/membership/roster.h"
#include "byteps/net/membership/scheduled_job.h"
#include "byteps/recovery/scheduler/leavers.h"
#include "byteps/recovery/scheduler/replica_table.h"
#include "byteps/recovery/scheduler/server_places.h"
#include "ps/internal/message.h"

namespace ps {

class SchedulerMembership;

// Removes replicas whose workers are lost, admits those that come back, and tells nodes of both
// (docs/design/replicas.md).
//
// Any thread.
class Replicas {
 public:
  using Clock = ScheduledJob::Clock;

  Replicas(SchedulerMembership* scheduler, ScheduledJob* job, ReplicaTable* table,
           const ServerPlaces* places, Leavers* leavers)
      : scheduler_(scheduler), job_(job), table_(table), places_(places), leavers_(leavers) {}

  // ----- called with ScheduledJob::mu held

  // Why a worker does not get the place of `member`.
  membership::Refusal WhyTaken(membership::Refusal refusal, const Member& member) const;
  // A worker has come to the place of one that was removed.
  void OnArrival(const Member& worker);
  bool IsComing(int worker) const;
  // Servers have not been told yet that this worker was removed.
  void AddRemoved(const Node& worker);
  void Clear();

  // ----- called without a lock

  // Removes the replica of a worker that is gone.  False: the job cannot go on without it.
  bool Lose(int node_id, const std::string& reason);
  // Tells a worker that came late, and those of its replica, to begin, once all of them are there.
  void OnNewcomer(const Node& worker);
  // Tells servers of the replicas that a job begins with.
  void OnBegun();
  // Tells all nodes how it is now, and servers whose connections they have to close.
  void Tell(const std::string& news);
  // A member says something of replicas.
  void OnWord(int sender, const membership::MemberWord& word);
  // Removes replicas of which some workers came, and others have not in time.
  void CheckComing(Clock::time_point now);

 private:
  int ReplicaOf(int worker) const PS_REQUIRES(job_->mu);
  // Whether workers of another replica go on, or have done all there was to do.
  bool OthersGoOn(int replica) const PS_REQUIRES(job_->mu);
  // Whether this worker is in the job, and its replica takes part in sums.
  bool IsOfPresent(int rank) const PS_REQUIRES(job_->mu);
  // Its workers that are there.  None: others have not come yet.
  std::vector<Node> CompleteReplica(int replica) const PS_REQUIRES(job_->mu);

  SchedulerMembership* const scheduler_;
  ScheduledJob* const job_;
  ReplicaTable* const table_ PS_PT_GUARDED_BY(job_->mu);
  const ServerPlaces* const places_;
  Leavers* const leavers_;
  std::vector<Node> removed_ PS_GUARDED_BY(job_->mu);  // of which servers were not told yet
};

}  // namespace ps
#endif  // BYTEPS_RECOVERY_SCHEDULER_REPLICAS_H_
