#ifndef BYTEPS_NET_MEMBERSHIP_REPLICA_VIEW_H_
#define BYTEPS_NET_MEMBERSHIP_REPLICA_VIEW_H_

#include <set>
#include <string>
#include <vector>

namespace ps {

// The replicas of a model in the job (docs/design/replicas.md), as the scheduler announces them.
struct ReplicaView {
  int workers = 0;      // number of workers of all replicas; each replica has equally many
  int epoch = 0;        // increases with each change
  std::string present;  // '1' for each replica that takes part in all-reduces, '0' for the others
  std::string waiting;  // '1' for each replica that is ready to join, '0' for the others
  // Epoch in which each replica became ready to join, or 0 if it was present from the beginning.
  std::vector<int> ready_epochs;
  // Donor of each replica: the replica that sends it the current state. -1 if the replica was
  // present from the beginning, or has not joined yet. The scheduler chooses donors, because nodes
  // may notice at different times that a replica was removed.
  std::vector<int> donors;
  std::string news;  // text that describes the latest change, for the log; may be ""

  int count() const { return static_cast<int>(present.size()); }
  bool IsPresent(int replica) const { return present[replica] == '1'; }
  // Returns the first of the replica's consecutive ranks.
  int FirstRank(int replica) const { return replica * (workers / count()); }
  // Returns the ranks of the replicas that are not present.
  std::set<int> AbsentRanks() const;
};

}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_REPLICA_VIEW_H_
