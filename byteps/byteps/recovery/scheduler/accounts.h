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

// What a scheduler concludes from the accounts of all nodes (docs/design/losses.md).  Not
// thread-safe.
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
#endif  // BYTEPS_RECOVERY_SCHEDULER_ACCOUNTS_H_
