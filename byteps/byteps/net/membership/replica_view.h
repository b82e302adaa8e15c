#ifndef BYTEPS_NET_MEMBERSHIP_REPLICA_VIEW_H_
#define BYTEPS_NET_MEMBERSHIP_REPLICA_VIEW_H_

#include <set>
#include <string>
#include <vector>

namespace ps {

// Which replicas of a model are in the job (docs/design/replicas.md), as the scheduler tells it.
struct ReplicaView {
  int workers = 0;      // of all replicas together; equally many are of each
  int epoch = 0;        // grows with each change
  std::string present;  // a '1' for each replica that takes part in sums, a '0' for each other one
  std::string waiting;  // a '1' for each that is ready to join, when the others say so
  // The life of each: the epoch in which it became ready to join; 0: it was there from the
  // beginning.
  std::vector<int> lives;
  // Which other one gives each what it lacks; -1: it was there from the beginning, or has not
  // joined yet.  The scheduler chooses it, since nodes may hear at different times of one that is
  // removed.
  std::vector<int> donors;
  std::string news;  // what has changed, for the log; may be empty

  int count() const { return static_cast<int>(present.size()); }
  bool IsPresent(int replica) const { return present[replica] == '1'; }
  // The ranks of a replica are those from this one on.
  int FirstRank(int replica) const { return replica * (workers / count()); }
  // Of replicas that are not present.
  std::set<int> AbsentRanks() const;
};

}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_REPLICA_VIEW_H_
