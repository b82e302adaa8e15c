// Roster: the nodes of a job, their ids and ranks.
#ifndef BYTEPS_NET_MEMBERSHIP_ROSTER_H_
#define BYTEPS_NET_MEMBERSHIP_ROSTER_H_

#include <map>
#include <string>
#include <vector>

#include "byteps/base/awake_clock.h"
#include "byteps/base/config.h"
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

}  // namespace ps

#endif  // BYTEPS_NET_MEMBERSHIP_ROSTER_H_
