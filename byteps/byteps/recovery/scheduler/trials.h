#ifndef BYTEPS_RECOVERY_SCHEDULER_TRIALS_H_
#define BYTEPS_RECOVERY_SCHEDULER_TRIALS_H_

#include <map>
#include <string>

#include "byteps/net/membership/scheduled_job.h"
#include "byteps/recovery/scheduler/replica_table.h"
#include "byteps/recovery/scheduler/replicas.h"
#include "byteps/recovery/scheduler/server_places.h"
#include "ps/internal/message.h"

namespace ps {

class SchedulerMembership;

// Decides which of two nodes is lost if the link between them breaks.
//
// Thread-safe.
class Trials {
 public:
  using Clock = ScheduledJob::Clock;

  Trials(SchedulerMembership* scheduler, ScheduledJob* job, const ReplicaTable* table,
         ServerPlaces* places, Replicas* replicas)
      : scheduler_(scheduler), job_(job), table_(table), places_(places), replicas_(replicas) {}

  // ----- called with ScheduledJob::mu held

  Clock::time_point NextDue() const;
  // Drops the accusations against a lost
  // server, and its own accusations.
  void Forget(int server);
  void Clear();

  // ----- called without a lock

  // Decides after a node has reported that its link with a server broke, which means that one of
  // the two is gone or unreachable. In a job without replicas, a server that a worker accuses is
  // lost. Otherwise the server is lost if most replicas report a broken link with it, or if the
  // scheduler does not hear from it in time. If the scheduler does hear from it, the accuser is
  // lost. Returns false if no decision was made.
  bool AccuseServer(int accuser, const Node& server, const std::string& reason);
  // Decides after a server has reported that its link with a worker broke. The worker's replica is
  // removed. If the job cannot continue without the replica, the server is lost. Returns false if
  // nothing was decided.
  bool AccuseWorker(int server, int worker, const std::string& reason);
  // Handles a message from an accused server. Returns false if the server is lost all the same.
  bool Acquit(int server);
  // Declares accused servers lost if the scheduler has not heard from them in time.
  void Condemn(Clock::time_point now);

 private:
  struct Accusation {
    int accuser;
    std::string reason;
    Clock::time_point due;  // the server is lost if the scheduler has not heard from it by then
  };

  // Returns whether most replicas, including this worker's, have recently lost their links with
  // this server.
  bool BreaksWithMost(int server, int worker) PS_REQUIRES(job_->mu);

  SchedulerMembership* const scheduler_;
  ScheduledJob* const job_;
  const ReplicaTable* const table_ PS_PT_GUARDED_BY(job_->mu);
  ServerPlaces* const places_;
  Replicas* const replicas_;
  // Accusations by node id of the server.
  std::multimap<int, Accusation> accusations_ PS_GUARDED_BY(job_->mu);
  std::map<int, std::map<int, Clock::time_point>> broken_links_
      PS_GUARDED_BY(job_->mu);  // times, by server and replica
};

}  // namespace ps
#endif  // BYTEPS_RECOVERY_SCHEDULER_TRIALS_H_
