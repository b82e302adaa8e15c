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

// Removes replicas whose workers are lost, admits replicas that come back, and announces both
// (docs/design/replicas.md).
class Replicas {
 public:
  using Clock = ScheduledJob::Clock;

  Replicas(SchedulerMembership* scheduler, ScheduledJob* job, ReplicaTable* table,
           const ServerPlaces* places, Leavers* leavers)
      : scheduler_(scheduler), job_(job), table_(table), places_(places), leavers_(leavers) {}

  // ----- called with ScheduledJob::mu held

  // Returns the refusal for a worker that wants the rank of `member`.
  membership::Refusal WhyTaken(membership::Refusal refusal, const Member& member) const;
  // Handles a worker that has got the rank of a removed one.
  void OnArrival(const Member& worker);
  bool IsComing(int worker) const;
  // Records a removed worker, so that the next announcement tells the servers of it.
  void AddRemoved(const Node& worker);
  void Clear();

  // ----- called without a lock

  // Removes the replica of a lost worker. Returns false if the job cannot continue without it.
  bool Lose(int node_id, const std::string& reason);
  // Handles a worker that registered after the job began. Starts the workers of its replica once
  // all of them have registered.
  void OnNewcomer(const Node& worker);
  // Announces the initial replicas to the servers.
  void OnBegun();
  // Announces the current state of the replicas to all nodes. `news`: description of the change,
  // for their logs. Servers also learn which connections to close.
  void Tell(const std::string& news);
  // Handles a member's message about replicas.
  void OnWord(int sender, const membership::MemberWord& word);
  // Removes replicas of which only some workers have registered in time.
  void CheckComing(Clock::time_point now);

 private:
  int ReplicaOf(int worker) const PS_REQUIRES(job_->mu);
  // Returns whether another replica than this one is present, or has done all its work.
  bool OthersGoOn(int replica) const PS_REQUIRES(job_->mu);
  // Returns whether this worker is in the job, and its replica takes part in sums.
  bool IsOfPresent(int rank) const PS_REQUIRES(job_->mu);
  // Returns the workers of a replica; none if some have not registered yet.
  std::vector<Node> CompleteReplica(int replica) const PS_REQUIRES(job_->mu);

  SchedulerMembership* const scheduler_;
  ScheduledJob* const job_;
  ReplicaTable* const table_ PS_PT_GUARDED_BY(job_->mu);
  const ServerPlaces* const places_;
  Leavers* const leavers_;
  std::vector<Node> removed_ PS_GUARDED_BY(job_->mu);  // not announced to servers yet
};

}  // namespace ps
#endif  // BYTEPS_RECOVERY_SCHEDULER_REPLICAS_H_
