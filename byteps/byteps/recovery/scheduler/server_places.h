#ifndef BYTEPS_RECOVERY_SCHEDULER_SERVER_PLACES_H_
#define BYTEPS_RECOVERY_SCHEDULER_SERVER_PLACES_H_

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "byteps/net/membership/event.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/scheduled_job.h"
#include "byteps/recovery/scheduler/replica_table.h"
#include "ps/internal/message.h"

namespace ps {

class SchedulerMembership;

// Server ranks. A lost server leaves its rank vacant, and another server takes the rank while the
// job goes on (docs/design/losses.md).
//
// Thread-safe.
class ServerPlaces {
 public:
  using Clock = ScheduledJob::Clock;

  // `forget`: called with ScheduledJob::mu held, with a node id, when the server of that id is
  // lost.
  ServerPlaces(SchedulerMembership* scheduler, ScheduledJob* job, ReplicaTable* replicas,
               std::function<void(int)> forget)
      : scheduler_(scheduler), job_(job), replicas_(replicas), forget_(std::move(forget)) {}

  // ----- called with ScheduledJob::mu held

  bool any_vacant() const;
  bool IsVacant(int node_id) const;
  // Gives `server` the rank that has been vacant for longest, because that rank's time limit ends
  // first. Does nothing if no rank is vacant.
  void Choose(Node* server) const;
  // Gives the rank of this node id to a server. Returns false if the rank was not vacant.
  bool Fill(int node_id);
  // Returns the time at which a server last got a vacant rank.
  Clock::time_point last_filled() const;
  // Returns the turns of all ranks (net/membership/words.h), without the losses that LostWords
  // reports.
  membership::Turns TurnsToTell() const;
  // Returns messages about the vacant ranks.
  std::vector<membership::MemberWord> LostWords() const;
  // State of a rank whose server was lost at least once, with its present server.
  struct Word {
    int server;
    membership::MemberWord word;
    std::vector<Node> nodes;
  };
  std::vector<Word> Words() const;
  // Restores the ranks of a job that an earlier scheduler began.
  void Restore(const membership::Turns& turns);
  void Clear();

  // ----- called without a lock

  // Makes the rank of a lost server vacant. Returns false if the job cannot continue without it.
  bool Lose(int node_id, const std::string& reason);
  // Tells `server` and the other nodes that it replaces a lost server.
  void OnFilled(const Node& server);
  // Tells all nodes the state of all ranks again, because some nodes may have missed it.
  void TellAll();
  // Returns the reason to stop waiting for servers that fill vacant ranks; "" to go on waiting.
  std::string ReasonToGiveUp(Clock::time_point now);

 private:
  struct Vacancy {
    Clock::time_point since;
    std::string reason;  // reason why the server was lost
  };

  // Returns the nodes that get messages about the loss or replacement of this server.
  std::vector<int> ToTellOf(int server) const PS_REQUIRES(job_->mu);
  void Emit(MembershipEvent::Kind kind, const Node& node, const std::string& reason);

  SchedulerMembership* const scheduler_;
  ScheduledJob* const job_;
  ReplicaTable* const replicas_ PS_PT_GUARDED_BY(job_->mu);
  const std::function<void(int)> forget_;
  std::map<int, Vacancy> vacancies_ PS_GUARDED_BY(job_->mu);  // by node id
  membership::Turns turns_ PS_GUARDED_BY(job_->mu);
  Clock::time_point last_filled_ PS_GUARDED_BY(job_->mu);
};

}  // namespace ps
#endif  // BYTEPS_RECOVERY_SCHEDULER_SERVER_PLACES_H_
