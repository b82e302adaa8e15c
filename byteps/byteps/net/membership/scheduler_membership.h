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

// Membership of the scheduler: admits nodes, watches them, and tells the remaining nodes when a
// node is lost or has left. Its RosterPolicy decides how the job continues after a loss.
class SchedulerMembership : public Membership {
 public:
  // Admits nodes from construction on, because the links listen before Join.
  SchedulerMembership(MembershipLinks* links, const MembershipSettings& settings,
                      Listener listener);
  ~SchedulerMembership() override;

  SchedulerMembership* AsScheduler() override { return this; }

  // Starts to watch the nodes.
  void Join() override;
  void StopByOrder(const std::string& how) override;
  bool HasWorkers() override;
  void Stop() override;
  void Handle(const Message& msg) override;
  void OnDisconnect(int node_id) override;
  void OnLinkLost(int node_id, const std::string& how, bool closed) override;
  std::string NameOf(int node_id) override;

  JobView View();

  // ----- for the policy

  std::string Name() const { return "the " + membership::NameOfScheduler(*job_.links); }
  void EmitProgress(MembershipEvent::Kind kind, const Node& node);
  // Makes the heartbeat thread ask for due tasks.
  void Wake() { heartbeats_.Wake(); }

  // Tells nodes that the job is complete, and with which nodes they have links. Sets the rate of
  // the slowest link in `beginning`. The caller holds ScheduledJob::telling_mu.
  void TellBeginning(const std::vector<Node>& newcomers, membership::Beginning beginning);
  // Fails the job if a server listens at an address that not all workers can reach.
  bool FailIfUnreachable();
  void Refuse(const Node& node, const membership::Refusal& refusal);
  // Sends REFUSED with `body` to a node outside the job, and closes its connection.
  void SendAway(const Node& node, const std::string& body);
  // Returns why no node is admitted now. Caller holds ScheduledJob::mu.
  membership::Refusal WhyClosed();
  // Continues a job that another scheduler began, in the same generation. Caller holds
  // ScheduledJob::mu.
  void TakeOver(uint64_t job);

  // Tells servers within kDepartureSeconds that the worker has left. Caller holds ScheduledJob::mu.
  void Depart(const Node& worker);
  void EndJob();
  // Handles the end of a node. `what`: text such as "was lost: ..." or "was stopped by SIGTERM".
  // `before`: text about earlier events, with which the report begins.
  void OnGone(int node_id, const std::string& what, const std::string& before = "");
  // Fails the job. `for_good`: whether the scheduler itself was told to stop, so that no further
  // generation begins. `file` and `line`: source location at which the failure was found.
  void FailJob(const std::string& reason, bool for_good = false,
               const char* file = __builtin_FILE(), int line = __builtin_LINE());

 private:
  using Clock = AwakeClock;
  using Refusal = membership::Refusal;
  using State = ScheduledJob::State;

  // Sets the job's generation in the links.
  void SetGeneration(int generation);

  // Functions for nodes that arrive (scheduler_arrivals.cc).
  void Register(const Message& msg);
  void Admit(const membership::Claim& claim, const Node& node) PS_REQUIRES(job_.mu);
  void TellAll();
  // Answers whether the node would be admitted. Changes nothing.
  void AnswerProbe(const Node& node, const membership::Claim& claim);
  // Returns the neighbors of a server, with which it has links; none without backups.
  std::vector<Node> NeighborsOf(int server) PS_REQUIRES(job_.mu);

  // Functions for nodes that leave.
  void OnFarewell(int node_id, const std::string& text);
  void OnLeave(int node_id, bool suspend);
  void TellOfDepartures();

  // Handles a node that is gone or silent: the job fails. If no worker has joined yet, the
  // scheduler only forgets the node.
  void OnLost(int node_id, const std::string& how);
  // Handles a report that a node cannot continue. The node itself or a server has sent it.
  void OnFailure(const Message& msg);
  void BeginGeneration();
  // Forgets the nodes of a finished or failed job.
  void Clear() PS_REQUIRES(job_.mu);

  void OnReport(int node_id, const std::string& report);

  // Tasks of the heartbeat thread.
  std::optional<Clock::time_point> NextDue();
  void OnBeat(Clock::time_point now);
  // Fails the job if an invariant of this process was broken, anywhere in its code.
  void CheckInvariants();
  void CheckPeers(Clock::time_point now);
  // Returns the reason to stop waiting for missing nodes; "" to go on waiting.
  std::string ReasonNotToStart(Clock::time_point now) PS_REQUIRES(job_.mu);
  // Returns the reason to stop waiting for any node; "" to go on waiting.
  std::string ReasonToGiveUp(Clock::time_point now) PS_REQUIRES(job_.mu);

  ScheduledJob job_;
  const std::unique_ptr<RosterPolicy> policy_;
  membership::IgnoredSenders ignored_;
  // Number of broken invariants for which this or an earlier job has failed.
  uint64_t broken_invariants_;
  std::atomic<int> last_generation_{0};  // generation that is set in the links

  // Failure of the previous generation, with MembershipSettings::keep.
  std::string failure_ PS_GUARDED_BY(job_.mu);
  Clock::time_point generation_begun_ PS_GUARDED_BY(job_.mu);
  // Workers that have left, until servers have been told.
  std::vector<Node> departed_ PS_GUARDED_BY(job_.mu);
  Clock::time_point tell_departed_ PS_GUARDED_BY(job_.mu);
  int refused_ PS_GUARDED_BY(job_.mu) = 0;

  HeartbeatThread heartbeats_;
};

}  // namespace ps

#endif  // BYTEPS_NET_MEMBERSHIP_SCHEDULER_MEMBERSHIP_H_
