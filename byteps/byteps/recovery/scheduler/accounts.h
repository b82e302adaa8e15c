#ifndef BYTEPS_RECOVERY_SCHEDULER_ACCOUNTS_H_
#define BYTEPS_RECOVERY_SCHEDULER_ACCOUNTS_H_

#include <map>
#include <set>
#include <vector>

#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/replica_view.h"
#include "byteps/net/membership/roster.h"
#include "byteps/net/membership/words.h"
#include "byteps/recovery/scheduler/replica_table.h"
#include "ps/internal/message.h"

namespace ps {
namespace membership {

// State of a job, as a restarted scheduler derives it from the accounts of all nodes. An account is
// a node's report on itself and the job (docs/design/losses.md). Not thread-safe.
class Accounts {
 public:
  using State = ReplicaTable::State;

  // Sets the size of the job. If size.replicas is below 2, the job has no replicas.
  void Expect(const JobSize& size) { size_ = size; }
  void Put(int id, const Account& account) { accounts_[id] = account; }
  void Forget(int id) { accounts_.erase(id); }
  // Returns the node's account, or null if the node has not returned.
  const Account* Find(int id) const;

  // Ranks of workers that left the job after their work was done.
  std::set<int> Left() const;
  // Returns the newest turn of each server rank (net/membership/words.h).
  Turns NewestTurns() const;
  // Returns whether the returned server is the current server of its rank.
  bool HasPlace(int server_rank) const;
  // Returns the newest epoch in any account. The dead scheduler may have announced a change to some
  // nodes only, so the caller then announces a later epoch to all nodes.
  int NewestEpoch() const;
  std::vector<ReplicaTable::Past> Replicas() const;
  // Returns whether a returned worker belongs to the present workers of its replica, not to earlier
  // ones.
  bool IsOf(int rank, const ReplicaTable::Past& replica) const;
  // Returns the ids of nodes that belong to the job and have not yet returned to this scheduler.
  std::vector<int> Missing() const;

 private:
  int count() const { return size_.replicas > 1 ? size_.replicas : 1; }
  int Of(int rank) const { return rank / (size_.workers / count()); }
  // Returns the newest view in the accounts of nodes of this role; null if no account has a view.
  const ReplicaView* Newest(Node::Role role) const;
  // Returns the epoch in which the replica became ready, according to this worker's account. 0: it
  // was present from the beginning. -1: this worker still waits for other workers of the replica.
  static int ReadyEpochOf(const Account& account, int replica);

  JobSize size_;
  std::map<int, Account> accounts_;  // by node id
};

}  // namespace membership
}  // namespace ps
#endif  // BYTEPS_RECOVERY_SCHEDULER_ACCOUNTS_H_
