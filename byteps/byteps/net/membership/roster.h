// What is known of the nodes of a job: who they are, their replicas, and what they tell a scheduler
// that goes on with their job.
#ifndef BYTEPS_NET_MEMBERSHIP_ROSTER_H_
#define BYTEPS_NET_MEMBERSHIP_ROSTER_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "byteps/base/process.h"
#include "byteps/net/membership/event.h"
#include "byteps/net/membership/membership.h"
#include "ps/internal/message.h"

namespace ps {

// The nodes of a job.
struct Member {
  Node node;
  bool left = false;     // it has done its work, or was removed
  bool removed = false;  // with its replica
  // It has left, and stays until all have: others may lack a sum that it has, should a server be
  // lost.
  bool lingers = false;
  // Known to the scheduler alone.
  bool left_to_suspend = false;
  AwakeClock::time_point left_at;  // of one that lingers
  AwakeClock::time_point heard;
  int link_mbps = 0;
};

// Numbers of nodes; -1: not known yet.
struct JobSize {
  int workers = -1;
  int servers = -1;
  int replicas = -1;  // that the workers are of
};

// By node id, without the scheduler.  Not thread-safe.
class Roster {
 public:
  Roster() = default;
  explicit Roster(const JobSize& expected) : expected_(expected) {}

  // How many nodes the job should have.
  const JobSize& expected() const { return expected_; }
  void Expect(const JobSize& size) { expected_ = size; }
  const std::map<int, Member>& members() const { return members_; }

  // Null: the job has no such node.
  Member* Find(int id);
  const Member* Find(int id) const;
  // Adds it, or changes what is known of the node of its id.
  Member* Put(const Node& node);
  void Erase(int id) { members_.erase(id); }
  void Clear() { members_.clear(); }

  int Count(Node::Role role) const;
  // Workers and servers that have not left.
  JobSize Present() const;
  std::vector<int> Ids(Node::Role role) const;
  // Of those that have not left.
  std::vector<int> PresentIds() const;
  // For servers, and for a worker whose launcher gave it none.
  int FirstFreeRank(Node::Role role) const;

  bool IsComplete() const;
  // "worker 3, worker 7, 2 servers"; empty where nobody is.
  std::string Missing() const;
  // Every worker came and has left.
  bool AllWorkersLeft() const;
  // Some worker has left and will come back.
  bool IsBeingSuspended() const;

 private:
  JobSize expected_;
  std::map<int, Member> members_;
};

// Its id in a job.
int IdOf(Node::Role role, int rank);

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

namespace membership {

// What nodes tell a scheduler that goes on with their job after another one has died, and what it
// concludes from that (docs/design/replicas.md).

// One node's.
struct Account {
  uint64_t job = 0;      // its number
  int life = 0;          // of the last scheduler that the node has heard; 0: it does not return
  bool is_late = false;  // of a worker: its replica came to a job that ran already
  std::set<int> left;    // ranks of workers that left in order; servers know
  Turns turns;           // of servers' places, as far as it has heard; a server knows its own
  ReplicaView replicas;  // the last that it has heard of; of no replica: none
};
// Behind the node's Claim.
std::string PackAccount(const Account& account);
// False: it says nothing that makes sense.  A Claim alone is an account of life 0.
bool ParseAccount(const std::string& text, Account* account);

// All of them.  Not thread-safe.
class Accounts {
 public:
  using State = ReplicaTable::State;

  // Of a job of this size; replicas below 2: without any.
  void Expect(const JobSize& size) { size_ = size; }
  void Put(int id, const Account& account) { accounts_[id] = account; }
  void Forget(int id) { accounts_.erase(id); }
  // Null: the node has not come.
  const Account* Find(int id) const;

  // Ranks of workers that left in order.
  std::set<int> Left() const;
  // Of servers' places, the newest.
  Turns NewestTurns() const;
  // Whether the server that came is the one that has its place.
  bool HasPlace(int server_rank) const;
  // Of all that has been told of replicas.  A change that the dead scheduler has told to some nodes
  // alone is told to all again.
  int NewestEpoch() const;
  std::vector<ReplicaTable::Past> Replicas() const;
  // Whether a worker that came is of the life that its replica has.
  bool IsOf(int rank, const ReplicaTable::Past& replica) const;
  // Ids of nodes that are of the job, and have not come.
  std::vector<int> Missing() const;

 private:
  int count() const { return size_.replicas > 1 ? size_.replicas : 1; }
  int Of(int rank) const { return rank / (size_.workers / count()); }
  // The newest view of servers or workers; null: none has any.
  const ReplicaView* Newest(Node::Role role) const;
  // Of the life that a worker is of; 0: from the beginning; -1: of one that waits for others of it.
  static int LifeOf(const Account& account, int replica);

  JobSize size_;
  std::map<int, Account> accounts_;  // by node id
};

}  // namespace membership
}  // namespace ps

#endif  // BYTEPS_NET_MEMBERSHIP_ROSTER_H_
