#ifndef BYTEPS_RECOVERY_SCHEDULER_REPLICA_TABLE_H_
#define BYTEPS_RECOVERY_SCHEDULER_REPLICA_TABLE_H_

#include <map>
#include <vector>

#include "byteps/base/awake_clock.h"
#include "byteps/net/membership/replica_view.h"

namespace ps {

// The replicas of a model, for the scheduler, which alone removes and admits them.
//
//   present ── lost ──▶ leaving ── acknowledged ──▶ away
//      ▲                   ▲                         │ its workers register
//      │ acknowledged      │ lost                    ▼
//   joining ◀── admitted ── waiting ◀── ready ── gathering
//
// Each change that is told begins an epoch, and servers acknowledge epochs: no worker of a removed
// replica comes again before all servers have dropped the old one, and nobody is told that a
// replica is present before all servers wait for its pushes.
//
// Not thread-safe.
class ReplicaTable {
 public:
  enum class State { kPresent, kLeaving, kAway, kGathering, kWaiting, kJoining };

  // A job of `workers` workers begins, all of whose replicas are there.  Of one replica it is a job
  // like any other.
  void Begin(int replicas, int workers);
  // What another scheduler has made of a replica.
  struct Past {
    State state = State::kPresent;
    int life = 0;
    int donor = -1;
  };
  // Such a job goes on.  The change to this epoch is to be told to all, and says again what only
  // some have heard.
  void Restore(const std::vector<Past>& replicas, int workers, int epoch,
               AwakeClock::time_point now);
  bool active() const { return replicas_.size() > 1; }
  int count() const { return static_cast<int>(replicas_.size()); }
  int Of(int rank) const { return rank / ranks(); }
  // Workers of each.
  int ranks() const { return workers_ / count(); }
  State state(int replica) const { return replicas_[replica].state; }
  // Whether it takes part in no sum yet, and its workers have come or are coming.
  bool IsComing(int replica) const;

  // It is removed.
  void Lose(int replica);
  // A worker of a replica that is away has registered.
  void Arrive(int replica, AwakeClock::time_point now);
  // Since when workers of a replica gather; of one that does.
  AwakeClock::time_point GathersSince(int replica) const { return replicas_[replica].since; }
  // A worker of it can take part.  True for the last one: the replica waits from now on.
  bool Ready(int rank);
  // Workers that take part are between two steps: it joins, once servers know.  False: this life
  // of it does not wait.
  bool Admit(int replica, int life);
  // Whether who knows the changes up to this epoch speaks of the life that a worker's replica has.
  bool Knows(int rank, int epoch) const { return replicas_[Of(rank)].epoch <= epoch; }
  // Another server has the place of this one, and has made no change yet.
  void Forget(int server) { acknowledged_.erase(server); }
  // A server has made all changes up to this epoch.  The replicas that are present now.
  std::vector<int> Acknowledge(int server, int epoch, const std::vector<int>& servers);

  // What servers are told, to whom those that join are present, or what workers are.
  ReplicaView View(bool to_servers) const;

 private:
  struct Replica {
    State state = State::kPresent;
    int epoch = 0;  // of the change that servers have to acknowledge
    int life = 0;   // see ReplicaView
    int donor = -1;
    AwakeClock::time_point since;
    std::vector<bool> ready;  // by rank within it
  };

  int workers_ = 0;
  int epoch_ = 0;
  std::vector<Replica> replicas_;
  std::map<int, int> acknowledged_;  // by server's node id
};

}  // namespace ps
#endif  // BYTEPS_RECOVERY_SCHEDULER_REPLICA_TABLE_H_
