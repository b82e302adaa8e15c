// NodeMembership: membership of a worker or server. It joins the job, sends heartbeats and reports
// of broken links, watches the scheduler, and follows its messages.
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

  // Registers this node, and blocks until every node has registered. Throws Error if the scheduler
  // refuses this node or gives up, NoAnswer if the scheduler does not answer, ComeAgain if the
  // scheduler may admit this node later, and JobFailed if the job failed after this node was
  // admitted. A probe (MembershipSettings::probe) always throws one of these, or WouldBeAdmitted.
  void Join() override;
  void StopByOrder(const std::string& how) override;
  // Returns false when the scheduler has announced that no worker is left.
  bool HasWorkers() override;
  void Stop() override;
  void Handle(const Message& msg) override;
  void OnDisconnect(int node_id) override;
  void OnLinkLost(int node_id, const std::string& how, bool closed) override;
  std::string NameOf(int node_id) override;
  // Returns the address at which other nodes reach this node; "" if it is not in the job.
  std::string HostOf(int node_id);

  // Leaves the job, as a worker. Waits a few seconds for the answer. If Farewell::failure is set,
  // the job fails for all nodes. If the scheduler keeps the cluster, Farewell::error does the same,
  // because a worker with incomplete work will be started again.
  void Leave(const Farewell& farewell);

  // Sends the scheduler a message about a replica (docs/design/replicas.md). In a Late message,
  // sets the epoch to the latest that this node knows.
  void SayOfReplica(membership::MemberWord word);

  // Attaches the result of `report`, at most kMaxReport bytes, to each heartbeat. The heartbeat
  // thread calls `report`, without a lock, and not after Stop.
  void SetReporter(std::function<std::string()> report);

  // Returns the rate of the slowest worker's NIC, in Mbit/s each way; 0 if the rate of any worker's
  // NIC is unknown. Equal on all workers. Call after Join, on a worker.
  int link_mbps();
  // Returns whether the job was running when this worker's replica came. The replica takes no part
  // in sums until it is admitted. Call after Join, on a worker.
  bool is_late();
  // Returns whether the scheduler has died and may return, or has returned and may still wait for
  // nodes.
  bool lacks_scheduler();

 private:
  using Clock = AwakeClock;
  enum class State { kJoining, kActive, kFailed, kEnded, kStopped };

  // Reason why this node leaves the job, or why the job ends.
  struct Failure {
    // Exception that Join throws: Error or JobFailed, ComeAgain, NoAnswer, WouldBeAdmitted.
    enum Kind { kFinal, kComeAgain, kNoAnswer, kWouldBeAdmitted } kind = kFinal;
    std::string reason;
    const char* file = "";  // source location at which the failure was found
    int line = 0;
  };

  // The connection to the scheduler has closed. The scheduler's last message may still arrive,
  // until `due`.
  struct SchedulerLoss {
    std::string how;
    Clock::time_point due;
  };

  // A broken connection to another node.
  struct BrokenLink {
    std::string how;
    Clock::time_point due;  // until then this node waits for others' news of the peer
    bool reported = false;
  };

  // Absence of a dead scheduler that may return.
  struct Absence {
    std::string how;
    Clock::time_point since;
    Clock::time_point deadline;
    Clock::time_point next;  // time of the next attempt to connect
    bool dials = false;      // an attempt is being made
    std::string last_error;
  };

  // Requests to repeat to the next scheduler.
  struct Asked {
    bool leaves = false;
    std::string farewell;
    bool ready = false;
    std::optional<membership::Admit> admit;
    // Other requests. When the scheduler answers a heartbeat, it has handled all requests that were
    // sent before that heartbeat, and these are dropped.
    std::vector<std::string> words;
    std::optional<size_t> marked;  // number of `words` that were sent before the last heartbeat
  };

  bool InJob() const PS_REQUIRES(mu_) {
    return state_ == State::kJoining || state_ == State::kActive;
  }
  // Changes kJoining or kActive to another state, and wakes all waiting threads.
  void Enter(State state) PS_REQUIRES(mu_);
  // Fails the job. `file` and `line`: source location at which the failure was found.
  void Fail(const std::string& reason, const char* file = __builtin_FILE(),
            int line = __builtin_LINE());
  // Ends Join without telling other nodes, because nothing has failed yet.
  void EndJoin(Failure failure) PS_REQUIRES(mu_);

  // The scheduler's messages.
  bool MaySend(const Message& msg);
  void OnWelcome(const Message& msg);
  void OnRefused(const std::string& body);
  void OnProbeAnswer(const std::string& body);
  void OnAdmission(const Message& msg);
  void OnNodeLeft(const Node& node);
  void OnMemberWord(const Message& msg);
  void OnReplicas(const ReplicaView& view, const std::vector<Node>& removed);
  void OnReplaced(const membership::ServerReplaced& word, const Node& successor);
  // Notes that the server of this rank is lost. `turn`: number of the event for this rank
  // (words.h). Returns false if this node already knows this event, or a later one.
  bool LoseServer(int rank, int turn, const std::string& reason);
  void OnEnd(bool suspended);

  membership::Claim MakeClaim(const Node& self);

  // Sends to the scheduler, unless the scheduler is dead and may return.
  void Tell(Control::Command command, const std::string& body, const std::vector<Node>& nodes = {});
  // Starts waiting for the lost scheduler. Returns false if this node does not wait.
  bool AwaitScheduler(const std::string& how);
  void LookForScheduler(Clock::time_point now);
  membership::Account MakeAccount();
  // Records a failed attempt to reach the scheduler. Returns false if no attempt was being made.
  bool NotFound(const std::string& how) PS_REQUIRES(mu_);
  // Handles this node's admission by a scheduler. Returns true if this node was waiting
  // for its scheduler to return.
  bool OnReturn(int scheduler_number);
  void AskAgain();
  void Remember(const membership::MemberWord& word) PS_REQUIRES(mu_);
  void OnHeartbeat();

  // Handles the loss of the scheduler. `unwelcome`: reason to give if the scheduler has not
  // admitted this node.
  void OnSchedulerLost(const std::string& how, const std::string& unwelcome);

  // Tasks of the heartbeat thread.
  std::optional<Clock::time_point> NextDue();
  void OnDue(Clock::time_point now);
  void OnBeat(Clock::time_point now);
  void ReportBrokenLinks(Clock::time_point now);
  void ReportBrokenLink(int id);
  // Fails the job if an invariant of this process was broken, anywhere in its code.
  void CheckInvariants();

  MembershipLinks* const links_;
  const MembershipSettings settings_;
  const uint64_t broken_invariants_;  // number that were broken before this job
  Announcer announcer_;
  membership::IgnoredSenders ignored_;

  Mutex mu_;
  CondVar cond_;  // Join, Leave and StopByOrder wait for it
  State state_ PS_GUARDED_BY(mu_) = State::kJoining;
  Failure failure_ PS_GUARDED_BY(mu_);
  bool welcomed_ PS_GUARDED_BY(mu_) = false;
  bool left_acknowledged_ PS_GUARDED_BY(mu_) = false;
  Roster roster_ PS_GUARDED_BY(mu_);  // nodes that this node knows
  int link_mbps_ PS_GUARDED_BY(mu_) = 0;
  bool is_late_ PS_GUARDED_BY(mu_) = false;
  ReplicaView view_ PS_GUARDED_BY(mu_);         // the latest view that the scheduler has sent
  membership::Turns turns_ PS_GUARDED_BY(mu_);  // turns of the servers' places
  std::function<std::string()> reporter_ PS_GUARDED_BY(mu_);
  Clock::time_point scheduler_heard_ PS_GUARDED_BY(mu_);
  std::optional<SchedulerLoss> scheduler_loss_ PS_GUARDED_BY(mu_);
  std::map<int, BrokenLink> broken_links_ PS_GUARDED_BY(mu_);  // by the peer's node id
  int scheduler_number_ PS_GUARDED_BY(mu_) =
      0;  // number of the scheduler (ScheduledJob::scheduler_number); 0: unknown
  std::optional<Absence> absence_ PS_GUARDED_BY(mu_);
  // Time by which a returned scheduler has stopped waiting for nodes.
  Clock::time_point settled_ PS_GUARDED_BY(mu_);
  Asked asked_ PS_GUARDED_BY(mu_);

  HeartbeatThread heartbeats_;
};

}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_NODE_MEMBERSHIP_H_
