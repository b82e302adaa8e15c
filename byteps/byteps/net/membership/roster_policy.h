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

// Decides what a scheduler does about nodes that are lost, and about those that come to a job which
// has begun. This one ends the job; recovery/scheduler has one that goes on.
//
// Any thread.
class RosterPolicy {
 public:
  using Clock = AwakeClock;

  // Both outlive this, and may not be complete yet.
  RosterPolicy(SchedulerMembership* scheduler, ScheduledJob* job)
      : scheduler_(scheduler), job_(job) {}
  virtual ~RosterPolicy() = default;

  // ----- called with ScheduledJob::mu held

  // `refusal` is that of a node for which there is no place: `member` has it, or, if that is null,
  // servers have all of theirs. Returns the refusal that it gets; it may be none.
  virtual membership::Refusal Reconsider(membership::Refusal refusal, const Member* member);
  // A server is admitted, and may get another place than the first that is free.
  virtual void ChoosePlace(Node* server);
  // All nodes of the job have come.
  virtual void OnComplete() {}
  // A node is put into the roster of a job that has begun.
  virtual void OnArrival(const Member& member);
  // Whether nodes of a job that another scheduler began are still to come.
  virtual bool Gathers();
  // Whether the policy keeps the message of a member, to hand it on later.
  virtual bool HoldsBack(const Message& msg);
  // Whether the end of this member is no news; its connection is closed.
  virtual bool IsExcused(int node_id);
  // Follows the reason why the node `lost` is gone.
  virtual std::string AlsoFailed(int lost);
  // Says why a worker may not leave in good order now; empty: it may.
  virtual std::string WhyMayNotLeave(int node_id);
  // `worker` has left in good order. Returns those that are told at once that they may go.
  virtual std::vector<Node> OnLeft(Member* worker);
  // Whether the job is done.
  virtual bool IsOver();
  // The job is over or has failed, and the roster forgets its nodes.
  virtual void Clear() {}
  // Replicas that are in the job; none: it is the only one that trains its model.
  virtual ReplicaView Replicas();
  // When OnDue is to be called; time_point::max(): not yet.
  virtual Clock::time_point NextDue();

  // ----- called without a lock

  // A node comes back to the job of a scheduler that died.
  virtual void OnReturn(const Node& node, const membership::Claim& claim,
                        const membership::Account& account);
  // All nodes were told that the job is complete.
  virtual void OnBegun() {}
  // `node` was admitted to a job that has begun.
  virtual void OnNewcomer(const Node& /*node*/) {}
  // A member has sent something. False: the member is lost all the same.
  virtual bool OnHeard(int node_id);
  // A member says something of replicas, or of others' losses (MEMBERS).
  virtual void OnWord(int /*sender*/, const std::string& /*text*/) {}
  // `worker` has said that it failed. True: the policy calls OnGone later.
  virtual bool HoldsFailure(int worker, const std::string& what);
  // `accuser` says that its link with `accused` broke. False: that is not decided here.
  virtual bool Judge(int accuser, const Node& accused, const std::string& reason);
  // A member cannot go on. False: nor can the job.
  virtual bool Lose(int node_id, const std::string& reason);
  // The same of a member that has left, and is gone.
  virtual bool LoseLeaver(int node_id);
  // Some worker has left: others may go.
  virtual void LetGo(Clock::time_point /*now*/) {}
  // The job has failed, and all that are in it were told.
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
