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

// Decides which of two nodes is lost when the link between them broke.
//
// Any thread.
class Trials {
 public:
  using Clock = ScheduledJob::Clock;

  Trials(SchedulerMembership* scheduler, ScheduledJob* job, const ReplicaTable* table,
         ServerPlaces* places, Replicas* replicas)
      : scheduler_(scheduler), job_(job), table_(table), places_(places), replicas_(replicas) {}

  // ----- called with ScheduledJob::mu held

  Clock::time_point NextDue() const;
  // The server of this node id is lost: neither accused nor believed any more.
  void Forget(int server);
  void Clear();

  // ----- called without a lock

  // A node says that its link with a server broke: one of them is gone, or cannot be reached.  Of
  // replicas and of two servers it is that node, if the server is heard from now on; else it is the
  // server.  It is also the server if most replicas say so.  False: that is not decided here.
  bool AccuseServer(int accuser, const Node& server, const std::string& reason);
  // A server says that of a worker.  False: that is not decided here.
  bool AccuseWorker(int server, int worker, const std::string& reason);
  // The server is heard.  False: it is lost all the same.
  bool Acquit(int server);
  // Loses servers that have not been heard in time.
  void Condemn(Clock::time_point now);

 private:
  struct Accusation {
    int accuser;
    std::string reason;
    Clock::time_point due;  // the server is gone, if nothing is heard of it
  };

  // Whether most replicas have lost their links with this server lately, as now that of this
  // worker.
  bool BreaksWithMost(int server, int worker) PS_REQUIRES(job_->mu);

  SchedulerMembership* const scheduler_;
  ScheduledJob* const job_;
  const ReplicaTable* const table_ PS_PT_GUARDED_BY(job_->mu);
  ServerPlaces* const places_;
  Replicas* const replicas_;
  // By the server's node id.
  std::multimap<int, Accusation> accusations_ PS_GUARDED_BY(job_->mu);
  std::map<int, std::map<int, Clock::time_point>> broken_links_
      PS_GUARDED_BY(job_->mu);  // when, by replica
};

}  // namespace ps
#endif  // BYTEPS_RECOVERY_SCHEDULER_TRIALS_H_
