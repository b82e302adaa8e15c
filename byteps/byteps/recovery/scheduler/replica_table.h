#ifndef BYTEPS_RECOVERY_SCHEDULER_REPLICA_TABLE_H_
#define BYTEPS_RECOVERY_SCHEDULER_REPLICA_TABLE_H_

#include <map>
#include <vector>

#include "byteps/base/awake_clock.h"
#include "byteps/net/membership/replica_view.h"

namespace ps {

// Membership of replicas. The scheduler keeps it, and only the scheduler removes and admits
// replicas.
//
//   present ── lost ──▶ leaving ── acknowledged ──▶ away
//      ▲                   ▲                         │ its workers register
//      │ acknowledged      │ lost                    ▼
//   joining ◀── admitted ── waiting ◀── ready ── gathering
//
// Each announced change begins an epoch, which all servers acknowledge. A removed replica can come
// back only when all servers have dropped its old workers. A replica is announced as present only
// when all servers wait for its pushes.
//
// Not thread-safe.
class ReplicaTable {
 public:
  enum class State { kPresent, kLeaving, kAway, kGathering, kWaiting, kJoining };

  // Starts a job of `workers` workers in which all replicas are present. With a single replica, the
  // table is inactive.
  void Begin(int replicas, int workers);
  // State of a replica, restored from accounts.
  struct Past {
    State state = State::kPresent;
    int ready_epoch = 0;
    int donor = -1;
  };
  // Restores the replicas of a job. The caller announces `epoch` to all nodes, because some nodes
  // may have missed earlier changes.
  void Restore(const std::vector<Past>& replicas, int workers, int epoch,
               AwakeClock::time_point now);
  bool active() const { return replicas_.size() > 1; }
  int count() const { return static_cast<int>(replicas_.size()); }
  int Of(int rank) const { return rank / ranks(); }
  // Workers per replica.
  int ranks() const { return workers_ / count(); }
  State state(int replica) const { return replicas_[replica].state; }
  // Returns whether the replica's workers are registering or waiting. Such a replica takes part in
  // no sum yet.
  bool IsComing(int replica) const;

  // Removes a replica.
  void Lose(int replica);
  // Records that a worker of an away replica has registered.
  void Arrive(int replica, AwakeClock::time_point now);
  // Time at which a gathering replica began to gather.
  AwakeClock::time_point GathersSince(int replica) const { return replicas_[replica].since; }
  // Records that a worker is ready. Returns true for the last worker of a replica, which then
  // waits.
  bool Ready(int rank);
  // Admits a waiting replica. The caller has checked that all present workers are between two
  // steps. The replica joins when all servers know of it. Returns false if the replica does not
  // wait, or became ready in another epoch.
  bool Admit(int replica, int ready_epoch);
  // Returns whether a node that knows all changes up to `epoch` knows when the replica of worker
  // `rank` became ready. If not, the node's messages are about earlier workers of the replica.
  bool Knows(int rank, int epoch) const { return replicas_[Of(rank)].epoch <= epoch; }
  // Forgets the acknowledgements of a server that was replaced.
  void Forget(int server) { acknowledged_.erase(server); }
  // Records that a server has applied all changes up to `epoch`. `servers`: node ids of all
  // servers. Returns the replicas that are present from now on.
  std::vector<int> Acknowledge(int server, int epoch, const std::vector<int>& servers);

  // Returns the view for servers, which includes joining replicas, or the view for workers.
  ReplicaView View(bool to_servers) const;

 private:
  struct Replica {
    State state = State::kPresent;
    int epoch = 0;        // change that servers have to acknowledge
    int ready_epoch = 0;  // see ReplicaView
    int donor = -1;
    AwakeClock::time_point since;
    std::vector<bool> ready;  // by rank within the replica
  };

  int workers_ = 0;
  int epoch_ = 0;
  std::vector<Replica> replicas_;
  std::map<int, int> acknowledged_;  // by server's node id
};

}  // namespace ps
#endif  // BYTEPS_RECOVERY_SCHEDULER_REPLICA_TABLE_H_
