#ifndef BYTEPS_NET_MEMBERSHIP_SCHEDULER_MEMBERSHIP_H_
#define BYTEPS_NET_MEMBERSHIP_SCHEDULER_MEMBERSHIP_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "byteps/base/awake_clock.h"
#include "byteps/base/mutex.h"
#include "byteps/net/membership/event.h"
#include "byteps/net/membership/heartbeat_thread.h"
#include "byteps/net/membership/ignored_senders.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/membership_links.h"
#include "byteps/net/membership/membership_settings.h"
#include "byteps/net/membership/refusal.h"
#include "byteps/net/membership/roster_policy.h"
#include "byteps/net/membership/scheduled_job.h"
#include "ps/internal/message.h"

namespace ps {

// The scheduler's side: admits nodes, watches them, and tells the others when one is lost or has
// left. What happens after a loss is its RosterPolicy's.
class SchedulerMembership : public Membership {
 public:
  // Admits nodes from now on: the links listen before Join.
  SchedulerMembership(MembershipLinks* links, const MembershipSettings& settings,
                      Listener listener);
  ~SchedulerMembership() override;

  SchedulerMembership* AsScheduler() override { return this; }

  // Begins to watch who is in the job.
  void Join() override;
  void StopByOrder(const std::string& how) override;
  bool HasWorkers() override;
  void Stop() override;
  void Handle(const Message& msg) override;
  void OnDisconnect(int node_id) override;
  void OnLinkLost(int node_id, const std::string& how, bool closed) override;
  std::string NameOf(int node_id) override;

  // Who is in the job now.
  JobView View();

  // ----- for the policy

  std::string Name() const { return "the " + membership::NameOfScheduler(*job_.links); }
  void EmitProgress(MembershipEvent::Kind kind, const Node& node);
  // The heartbeats' thread has something to do soon.
  void Wake() { heartbeats_.Wake(); }

  // Tells nodes that the job is complete, and of the nodes with which they have links.
  // `beginning`: without the rate of the slowest link. Caller holds ScheduledJob::telling_mu.
  void TellBeginning(const std::vector<Node>& newcomers, membership::Beginning beginning);
  // Fails the job if a server listens where not all workers can reach it.
  bool FailIfUnreachable();
  void Refuse(const Node& node, const membership::Refusal& refusal);
  // Sends REFUSED with `body` to a node that is not in the job, and closes its connection.
  void SendAway(const Node& node, const std::string& body);
  // Why nobody is admitted now. Caller holds ScheduledJob::mu.
  membership::Refusal WhyClosed();
  // The generation of a job that another scheduler began. Caller holds ScheduledJob::mu.
  void TakeOver(uint64_t job);

  // Servers are told within kDepartureSeconds that the worker has left. Caller holds
  // ScheduledJob::mu.
  void Depart(const Node& worker);
  void EndJob();
  // A node is gone: "was lost: ...", "was stopped by SIGTERM". `before`: what happened before.
  void OnGone(int node_id, const std::string& what, const std::string& before = "");
  // `for_good`: the scheduler is told to end. The place is that of the call: what found the
  // failure.
  void FailJob(const std::string& reason, bool for_good = false,
               const char* file = __builtin_FILE(), int line = __builtin_LINE());

 private:
  using Clock = AwakeClock;
  using Refusal = membership::Refusal;
  using State = ScheduledJob::State;

  // Tells the links.
  void SetIncarnation(int incarnation);

  // Nodes that come (scheduler_arrivals.cc).
  void Register(const Message& msg);
  void Admit(const membership::Claim& claim, const Node& node) PS_REQUIRES(job_.mu);
  void TellAll();
  // A node asks whether it would be admitted, and nothing changes.
  void AnswerProbe(const Node& node, const membership::Claim& claim);
  // With backups, those with which a server has links.
  std::vector<Node> NeighborsOf(int server) PS_REQUIRES(job_.mu);

  // Nodes that leave.
  void OnFarewell(int node_id, const std::string& text);
  void OnLeave(int node_id, bool suspend);
  void TellOfDepartures();

  // Nodes that are lost.
  //
  // The node is gone, or silent: the job fails.  But before a worker came there is no
  // job that could fail: the scheduler forgets the node.
  void OnLost(int node_id, const std::string& how);
  // A node cannot go on, for a reason that it or a server, which names it, says.
  void OnFailure(const Message& msg);
  void BeginIncarnation();
  // Forgets the nodes of a job that is over or has failed.
  void Clear() PS_REQUIRES(job_.mu);

  void OnReport(int node_id, const std::string& report);

  // The heartbeats' thread.
  std::optional<Clock::time_point> NextDue();
  void OnBeat(Clock::time_point now);
  // An invariant was broken in this process, whatever it does: the job fails.
  void CheckInvariants();
  void CheckPeers(Clock::time_point now);
  // Why the nodes that are missing are not waited for any more; empty: they are.
  std::string ReasonNotToStart(Clock::time_point now) PS_REQUIRES(job_.mu);
  // Why nobody needs to be waited for any more; empty: not so.
  std::string ReasonToGiveUp(Clock::time_point now) PS_REQUIRES(job_.mu);

  ScheduledJob job_;
  const std::unique_ptr<RosterPolicy> policy_;
  membership::IgnoredSenders ignored_;
  uint64_t broken_invariants_;            // that this job has failed for, or an earlier one
  std::atomic<int> last_incarnation_{0};  // that the links know of

  // With MembershipSettings::keep: of the last generation.
  std::string failure_ PS_GUARDED_BY(job_.mu);
  Clock::time_point incarnation_begun_ PS_GUARDED_BY(job_.mu);
  // Workers that have left, of which servers were not told yet.
  std::vector<Node> departed_ PS_GUARDED_BY(job_.mu);
  Clock::time_point tell_departed_ PS_GUARDED_BY(job_.mu);
  int refused_ PS_GUARDED_BY(job_.mu) = 0;

  HeartbeatThread heartbeats_;
};

}  // namespace ps

#endif  // BYTEPS_NET_MEMBERSHIP_SCHEDULER_MEMBERSHIP_H_
