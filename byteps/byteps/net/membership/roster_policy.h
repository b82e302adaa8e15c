#ifndef BYTEPS_NET_MEMBERSHIP_ROSTER_POLICY_H_
#define BYTEPS_NET_MEMBERSHIP_ROSTER_POLICY_H_

#include <string>
#include <vector>

#include "byteps/base/awake_clock.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/refusal.h"
#include "byteps/net/membership/replica_view.h"
#include "byteps/net/membership/roster.h"
#include "byteps/net/membership/words.h"
#include "ps/internal/message.h"

namespace ps {

struct ScheduledJob;
class SchedulerMembership;

// Scheduler's policy for lost nodes, and for nodes that come to a running job. This base class ends
// the job at a loss; the policy in recovery/scheduler continues it.
//
// Thread-safe.
class RosterPolicy {
 public:
  using Clock = AwakeClock;

  // `scheduler` and `job` must outlive this object. They may still be under construction.
  RosterPolicy(SchedulerMembership* scheduler, ScheduledJob* job)
      : scheduler_(scheduler), job_(job) {}
  virtual ~RosterPolicy() = default;

  // ----- called with ScheduledJob::mu held

  // Reconsiders the refusal of a node for which no rank is free. `member`: the node that has the
  // wanted rank; null: all ranks of servers are taken. Returns the final refusal, or none.
  virtual membership::Refusal Reconsider(membership::Refusal refusal, const Member* member);
  // Called for a server that is being admitted with the lowest free rank. May give it another rank.
  virtual void ChoosePlace(Node* server);
  // Called when all nodes of the job are present.
  virtual void OnComplete() {}
  // Called when a node joins the roster of a running job.
  virtual void OnArrival(const Member& member);
  // Returns whether nodes of a job that another scheduler began are still missing.
  virtual bool Gathers();
  // Returns whether the policy keeps this member's message, to handle it later.
  virtual bool HoldsBack(const Message& msg);
  // Returns whether the loss of this member was expected. The scheduler then only closes the
  // member's connection.
  virtual bool IsExcused(int node_id);
  // Returns text to append to the reason why the node `lost` is gone; may be "".
  virtual std::string AlsoFailed(int lost);
  // Returns why a worker may not leave in order now, or "" if it may.
  virtual std::string WhyMayNotLeave(int node_id);
  // Called when `worker` has left in order. Returns the workers to dismiss at once.
  virtual std::vector<Node> OnLeft(Member* worker);
  // Returns whether the job is done.
  virtual bool IsOver();
  // Called when the job is over or has failed. The roster then forgets its nodes.
  virtual void Clear() {}
  // Returns the jobs (replicas) that train this model together. The view is empty if one job trains
  // it alone.
  virtual ReplicaView Replicas();
  // Returns the time at which to call OnDue; time_point::max() if nothing is due at any time.
  virtual Clock::time_point NextDue();

  // ----- called without a lock

  // Called when a node returns to the job of a scheduler that died.
  virtual void OnReturn(const Node& node, const membership::Claim& claim,
                        const membership::Account& account);
  // Called when every node has been told that the job is complete.
  virtual void OnBegun() {}
  // Called when `node` was admitted to a running job.
  virtual void OnNewcomer(const Node& /*node*/) {}
  // Called when a member has sent a message. Returns false if the member counts as lost anyway.
  virtual bool OnHeard(int node_id);
  // Called when a member has sent a message about replicas or losses (MEMBERS).
  virtual void OnWord(int /*sender*/, const std::string& /*text*/) {}
  // Called when `worker` has reported its failure. Returns true if the policy calls OnGone later.
  virtual bool HoldsFailure(int worker, const std::string& what);
  // Decides what to do when `accuser` has reported that its link with `accused` broke. Returns
  // false to leave the decision to the caller.
  virtual bool Judge(int accuser, const Node& accused, const std::string& reason);
  // Handles the loss of a member. Returns false if the job cannot continue without the member.
  virtual bool Lose(int node_id, const std::string& reason);
  // Handles the end of a member that has left in order. Returns false if the job cannot continue.
  virtual bool LoseLeaver(int node_id);
  // Dismisses workers that linger and are not needed any more. Called when a worker has left.
  virtual void LetGo(Clock::time_point /*now*/) {}
  // Called when the job has failed, after all its nodes were sent the reason.
  virtual void OnJobFailed() {}
  virtual void OnDue(Clock::time_point /*now*/) {}
  // Called at each heartbeat.
  virtual void OnBeat(Clock::time_point /*now*/) {}

 protected:
  SchedulerMembership* const scheduler_;
  ScheduledJob* const job_;
};

}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_ROSTER_POLICY_H_
