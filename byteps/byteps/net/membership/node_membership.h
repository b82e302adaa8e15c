// The side of a worker or a server: joins the job, tells the scheduler that it lives and what
// breaks, watches the scheduler, and hears from it of everything else.
#ifndef BYTEPS_NET_MEMBERSHIP_NODE_MEMBERSHIP_H_
#define BYTEPS_NET_MEMBERSHIP_NODE_MEMBERSHIP_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "byteps/base/awake_clock.h"
#include "byteps/base/mutex.h"
#include "byteps/net/membership/announcer.h"
#include "byteps/net/membership/event.h"
#include "byteps/net/membership/heartbeat_thread.h"
#include "byteps/net/membership/ignored_senders.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/membership_links.h"
#include "byteps/net/membership/membership_settings.h"
#include "byteps/net/membership/replica_view.h"
#include "byteps/net/membership/roster.h"
#include "byteps/net/membership/words.h"

namespace ps {

class NodeMembership : public Membership {
 public:
  NodeMembership(MembershipLinks* links, const MembershipSettings& settings, Listener listener);
  ~NodeMembership() override;

  NodeMembership* AsNode() override { return this; }

  // Registers and blocks until every node has.  Throws Error when the scheduler refuses or
  // gives up, NoAnswer when it does not answer, ComeAgain when it would take this node later,
  // and JobFailed when the job failed after it had taken this node.  A probe ends with one of these
  // or with WouldBeAdmitted.
  void Join() override;
  void StopByOrder(const std::string& how) override;
  bool HasWorkers() override;  // the scheduler says so when none is left
  void Stop() override;
  void Handle(const Message& msg) override;
  void OnDisconnect(int node_id) override;
  void OnLinkLost(int node_id, const std::string& how, bool closed) override;
  std::string NameOf(int node_id) override;
  // The address by which others know a node; empty: it is not in the job.
  std::string HostOf(int node_id);

  // On a worker: says goodbye and waits, a few seconds at most, for the answer.  With a failure the
  // job has failed, for all.  An error counts as one where the scheduler keeps the cluster: who has
  // not done all of its work is started again.
  void Leave(const Farewell& farewell);

  // Tells the scheduler something of a replica (docs/design/replicas.md).  Of one that is late:
  // which changes of the replicas this node has heard of.
  void SayOfReplica(membership::MemberWord word);

  // From now on heartbeats carry what `report` returns, at most kMaxReport bytes.  It is called
  // by the heartbeats' thread with no lock held, and is not called any more after Stop.
  void SetReporter(std::function<std::string()> report);

  // On a worker that has joined: Mbit/s each way of the slowest worker's network card; 0 where one
  // of them is not known.  The same on all workers.
  int link_mbps();
  // On a worker that has joined: whether its replica has come to a job that runs, and takes part in
  // nothing until it is admitted.
  bool is_late();
  // Whether there is no scheduler, or one that may still await nodes that return.
  bool lacks_scheduler();

 private:
  using Clock = AwakeClock;
  enum class State { kJoining, kActive, kFailed, kEnded, kStopped };

  // Why the job goes on without this node, or does not go on.
  struct Failure {
    // What Join throws: Error or JobFailed, ComeAgain, NoAnswer, WouldBeAdmitted.
    enum Kind { kFinal, kComeAgain, kNoAnswer, kWouldBeAdmitted } kind = kFinal;
    std::string reason;
    const char* file = "";  // what found it
    int line = 0;
  };

  // The connection to the scheduler closed; until `due` its last word may still come.
  struct SchedulerLoss {
    std::string how;
    Clock::time_point due;
  };

  // A connection to another node that broke.
  struct BrokenLink {
    std::string how;
    Clock::time_point due;  // until then others may speak
    bool reported = false;
  };

  // The scheduler has died, and may return.
  struct Absence {
    std::string how;
    Clock::time_point since;
    Clock::time_point deadline;
    Clock::time_point next;  // attempt to reach it
    bool dials = false;      // one is being made
    std::string last_error;
  };

  // What the next scheduler has to be asked again.
  struct Asked {
    bool leaves = false;
    std::string farewell;
    bool ready = false;
    std::optional<membership::Admit> admit;
    // Others, until the scheduler has answered a heartbeat that was sent after them: what it has
    // told of them before came then, too.
    std::vector<std::string> words;
    std::optional<size_t> marked;  // so many were sent before the last heartbeat
  };

  bool InJob() const PS_REQUIRES(mu_) {
    return state_ == State::kJoining || state_ == State::kActive;
  }
  // Leaves kJoining or kActive for another state, and wakes all who wait.
  void Enter(State state) PS_REQUIRES(mu_);
  // The place is that of the call: what found the failure.
  void Fail(const std::string& reason, const char* file = __builtin_FILE(),
            int line = __builtin_LINE());
  // Ends Join without telling anybody else: nothing has failed yet.
  void EndJoin(Failure failure) PS_REQUIRES(mu_);

  // What the scheduler says.
  bool MaySend(const Message& msg);
  void OnWelcome(const Message& msg);
  void OnRefused(const std::string& body);
  void OnProbeAnswer(const std::string& body);
  void OnAdmission(const Message& msg);
  void OnNodeLeft(const Node& node);
  void OnMemberWord(const Message& msg);
  void OnReplicas(const ReplicaView& view, const std::vector<Node>& removed);
  void OnReplaced(const membership::ServerReplaced& word, const Node& successor);
  // The server of this rank is lost, which is the news of this turn or an earlier one.  False: it
  // is none.
  bool LoseServer(int rank, int turn, const std::string& reason);
  void OnEnd(bool suspended);

  membership::Claim MakeClaim(const Node& self);

  // Where a scheduler may return (node_return.cc).
  //
  // To the scheduler, unless it is away.
  void Tell(Control::Command command, const std::string& body, const std::vector<Node>& nodes = {});
  // It is lost.  False: this node does not wait for it.
  bool AwaitScheduler(const std::string& how);
  void LookForScheduler(Clock::time_point now);
  membership::Account MakeAccount();
  // An attempt to reach it has failed.  False: there was none.
  bool NotFound(const std::string& how) PS_REQUIRES(mu_);
  // A scheduler of this life has taken this node.  True: back.
  bool OnReturn(int life);
  void AskAgain();
  void Remember(const membership::MemberWord& word) PS_REQUIRES(mu_);
  void OnHeartbeat();

  // `unwelcome`: what it means where the scheduler has not taken this node.
  void OnSchedulerLost(const std::string& how, const std::string& unwelcome);

  // The heartbeats' thread.
  std::optional<Clock::time_point> NextDue();
  void OnDue(Clock::time_point now);
  void OnBeat(Clock::time_point now);
  void ReportBrokenLinks(Clock::time_point now);
  void ReportBrokenLink(int id);
  // An invariant was broken in this process, whatever it does: the job fails.
  void CheckInvariants();

  MembershipLinks* const links_;
  const MembershipSettings settings_;
  const uint64_t broken_invariants_;  // of earlier jobs
  Announcer announcer_;
  membership::IgnoredSenders ignored_;

  Mutex mu_;
  CondVar cond_;  // for Join, Leave and StopByOrder
  State state_ PS_GUARDED_BY(mu_) = State::kJoining;
  Failure failure_ PS_GUARDED_BY(mu_);
  bool welcomed_ PS_GUARDED_BY(mu_) = false;
  bool left_acknowledged_ PS_GUARDED_BY(mu_) = false;
  Roster roster_ PS_GUARDED_BY(mu_);  // those that this node has heard of
  int link_mbps_ PS_GUARDED_BY(mu_) = 0;
  bool is_late_ PS_GUARDED_BY(mu_) = false;
  ReplicaView view_ PS_GUARDED_BY(mu_);         // the last one
  membership::Turns turns_ PS_GUARDED_BY(mu_);  // of servers' places
  std::function<std::string()> reporter_ PS_GUARDED_BY(mu_);
  Clock::time_point scheduler_heard_ PS_GUARDED_BY(mu_);
  std::optional<SchedulerLoss> scheduler_loss_ PS_GUARDED_BY(mu_);
  std::map<int, BrokenLink> broken_links_ PS_GUARDED_BY(mu_);  // by the peer's node id
  int life_ PS_GUARDED_BY(mu_) = 0;                            // of the scheduler; 0: not known
  std::optional<Absence> absence_ PS_GUARDED_BY(mu_);
  Clock::time_point settled_ PS_GUARDED_BY(mu_);  // the scheduler that returned has heard all
  Asked asked_ PS_GUARDED_BY(mu_);

  HeartbeatThread heartbeats_;
};

}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_NODE_MEMBERSHIP_H_
