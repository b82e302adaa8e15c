#ifndef BYTEPS_NET_MEMBERSHIP_ROSTER_H_
#define BYTEPS_NET_MEMBERSHIP_ROSTER_H_

#include <map>
#include <string>
#include <vector>

#include "byteps/base/awake_clock.h"
#include "byteps/base/config.h"
#include "ps/internal/message.h"

namespace ps {

// A node of a job.
struct Member {
  Node node;
  bool left = false;     // whether the node's work is done, or the node was removed
  bool removed = false;  // whether the node was removed, together with its replica
  // Whether the node has left but stays until all workers have left, because other workers may need
  // its sums if a server is lost.
  bool lingers = false;
  // Only the scheduler sets the following members.
  bool left_to_suspend = false;
  AwakeClock::time_point left_at;  // time at which a lingering node left
  AwakeClock::time_point heard;
  int link_mbps = 0;
};

// Numbers of nodes; -1: not known yet.
struct JobSize {
  int workers = -1;
  int servers = -1;
  int replicas = -1;  // number of replicas that the workers belong to
};

// The nodes of a job by node id, without the scheduler. Not thread-safe.
class Roster {
 public:
  Roster() = default;
  explicit Roster(const JobSize& expected) : expected_(expected) {}

  // Numbers of nodes that the job should have.
  const JobSize& expected() const { return expected_; }
  void Expect(const JobSize& size) { expected_ = size; }
  const std::map<int, Member>& members() const { return members_; }

  // Returns null if the job has no such node.
  Member* Find(int id);
  const Member* Find(int id) const;
  // Adds the node, or updates its record.
  Member* Put(const Node& node);
  void Erase(int id) { members_.erase(id); }
  void Clear() { members_.clear(); }

  int Count(Node::Role role) const;
  // Returns the numbers of workers and servers that have not left.
  JobSize Present() const;
  std::vector<int> Ids(Node::Role role) const;
  // Ids of the nodes that have not left.
  std::vector<int> PresentIds() const;
  // Returns the lowest free rank, for servers and for workers without a rank from their launcher.
  int FirstFreeRank(Node::Role role) const;

  bool IsComplete() const;
  // Returns text such as "worker 3, worker 7, 2 servers"; "" if the job is complete.
  std::string Missing() const;
  // Returns whether every worker has come and left.
  bool AllWorkersLeft() const;
  // Returns whether a worker has left to be suspended, and will join again.
  bool IsBeingSuspended() const;

 private:
  JobSize expected_;
  std::map<int, Member> members_;
};

// Returns the node id of this role and rank.
int IdOf(Node::Role role, int rank);

}  // namespace ps

#endif  // BYTEPS_NET_MEMBERSHIP_ROSTER_H_
