#ifndef BYTEPS_RECOVERY_SCHEDULER_LEAVERS_H_
#define BYTEPS_RECOVERY_SCHEDULER_LEAVERS_H_

#include <map>
#include <set>
#include <vector>

#include "byteps/net/membership/roster.h"
#include "byteps/net/membership/scheduled_job.h"
#include "byteps/recovery/scheduler/replica_table.h"
#include "byteps/recovery/scheduler/server_places.h"
#include "ps/internal/message.h"

namespace ps {

class SchedulerMembership;

// Workers that have done their work and linger. A worker lingers for two reasons. If a server is
// lost, other workers may need sums that only this worker has. And if the scheduler may restart,
// all servers must know that this worker has left before it goes.
//
// Thread-safe.
class Leavers {
 public:
  using Clock = ScheduledJob::Clock;

  Leavers(SchedulerMembership* scheduler, ScheduledJob* job, const ReplicaTable* replicas,
          const ServerPlaces* places)
      : scheduler_(scheduler), job_(job), replicas_(replicas), places_(places) {}

  // ----- called with ScheduledJob::mu held

  // Implements RosterPolicy::OnLeft.
  std::vector<Node> OnLeft(Member* worker);
  // Returns whether every worker of the present replicas has left.
  bool HaveAllLeft() const;
  // Returns whether every worker of the present replicas has left, and all servers know it.
  bool IsOver() const;
  // Lets a worker go. Returns false if it did not linger.
  bool Release(Member* worker);
  // Forgets which workers a lost server knew to have left, because its successor does not know
  // them.
  void Forget(int server);
  void Clear();

  // ----- called without a lock

  // Handles the end of a lingering worker. Returns false if it did not linger.
  bool Lose(int node_id);
  // Lets workers go that need not linger any longer.
  void LetGo(Clock::time_point now);
  // Records that a server knows that a worker has left.
  void OnKnown(int server, int worker_rank);
  // Lets all lingering workers go, because the job has failed.
  void LetAllGo();

 private:
  struct Leaver {
    Node node;
    std::set<int> known;  // servers that know that this worker has left
  };

  bool asks() const { return job_->settings.scheduler_return_s > 0; }
  // Tells servers that a worker has left.
  void Tell(const Node& worker) PS_REQUIRES(job_->mu);

  SchedulerMembership* const scheduler_;
  ScheduledJob* const job_;
  const ReplicaTable* const replicas_ PS_PT_GUARDED_BY(job_->mu);
  const ServerPlaces* const places_;
  std::map<int, Leaver> asked_ PS_GUARDED_BY(job_->mu);  // by node id
};

}  // namespace ps
#endif  // BYTEPS_RECOVERY_SCHEDULER_LEAVERS_H_
