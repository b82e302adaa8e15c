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

// The places of servers: a server that is lost leaves its own vacant, and another one takes it
// while the job goes on (docs/design/losses.md).
//
// Any thread.
class ServerPlaces {
 public:
  using Clock = ScheduledJob::Clock;

  // `forget` is called with ScheduledJob::mu held when the server of a node id is lost.
  ServerPlaces(SchedulerMembership* scheduler, ScheduledJob* job, ReplicaTable* replicas,
               std::function<void(int)> forget)
      : scheduler_(scheduler), job_(job), replicas_(replicas), forget_(std::move(forget)) {}

  // ----- called with ScheduledJob::mu held

  bool any_vacant() const;
  bool IsVacant(int node_id) const;
  // Gives `server` the place that has been vacant for longest, if one is: the job ends soonest
  // without it.
  void Choose(Node* server) const;
  // A server has come to the place of this node id.  False: it was not vacant.
  bool Fill(int node_id);
  // When a place was filled last.
  Clock::time_point last_filled() const;
  // Turns of all places but those that LostWords tells a node.
  membership::Turns TurnsToTell() const;
  // Says what became of the servers whose places are vacant.
  std::vector<membership::MemberWord> LostWords() const;
  // The fate of a place that was ever lost, with the node that has it now.
  struct Word {
    int server;
    membership::MemberWord word;
    std::vector<Node> nodes;
  };
  std::vector<Word> Words() const;
  // The places are those of another scheduler's job.
  void Restore(const membership::Turns& turns);
  void Clear();

  // ----- called without a lock

  // Another one may take its place.  False: the job cannot go on without it.
  bool Lose(int node_id, const std::string& reason);
  // Tells the others, and it, that `server` has the place of one that was lost.
  void OnFilled(const Node& server);
  // Tells nodes again what has become of servers: some may not have heard it.
  void TellAll();
  // Why no other server is waited for any more; empty: not so.
  std::string ReasonToGiveUp(Clock::time_point now);

 private:
  struct Vacancy {
    Clock::time_point since;
    std::string reason;  // what became of the server
  };

  // Nodes that hear of the loss or the replacement of this server.
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
