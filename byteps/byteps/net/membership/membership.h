// Who is in the job: admission, liveness, departure.
//
// The scheduler is the one authority.  It admits a node or refuses it with a
// reason, tells every node once all have come, watches each of them (its
// connection, its heartbeats), and tells the others when one is lost or has left.
// The other nodes watch the scheduler alone.  So one process decides who is lost,
// and all survivors give the same reason.
//
//   node                              scheduler
//    | -- ADD_NODE (role, rank, counts) --> |  checks, gives an id
//    | <-- WELCOME (id) or REFUSED (why) -- |  to a probe always REFUSED: with what it would say
//    | <-- ADD_NODE (servers, to workers) - |  once all have registered; with the slowest worker's
//    |                                      |  link
//    | -- HEARTBEAT --> <-- HEARTBEAT ----- |  as long as the job lives; a node's may carry a
//    |                                      |  report on itself (SetReporter)
//    | <-- JOB_FAILED (why) --------------- |  a peer was lost
//    | -- JOB_FAILED (why) ---------------> |  a connection between two nodes broke
//    | -- LEAVE (finish | suspend) -------> |  a worker has done its work
//    | -- LEAVE (failed: why) ------------> |  a worker ends for another reason: the job fails
//    | -- LEAVE (stopped ...) ------------> |  a server was told to end: the job fails
//    | <-- NODE_LEFT (who) ---------------- |  to the worker itself at once; to servers, those
//    |                                      |  of some moments together
//    | <-- JOB_END (finish | suspend) ----- |  to servers, once no worker is left
//
// Each command is taken from those alone who may send it (net/membership/commands.cc).
//
// All times are of the AwakeClock: who stood still itself gives the others time to be heard before
// it calls them lost, and says of itself that it stood still (base/stall_watch.h).
//
// After a suspended job the scheduler forgets the nodes and admits those of the
// next one; its worker count is then taken from the first worker that comes.
//
// Incarnations.  A scheduler that keeps the cluster (MembershipSettings::keep) does the same after
// a failure: it tells all nodes, closes their connections, forgets them, and admits those of the
// next incarnation of the job.  It numbers the incarnations; the number is part of the job's, which
// who connects and who listens prove to each other, so that a connection belongs to one
// incarnation.  Connections of an older one that still live are nobody's: what comes by them is
// not looked at.  Who comes while there is no room for it yet, since the old incarnation has not
// ended for the scheduler, is told to come again.
#ifndef BYTEPS_NET_MEMBERSHIP_MEMBERSHIP_H_
#define BYTEPS_NET_MEMBERSHIP_MEMBERSHIP_H_

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/base/stall_watch.h"
#include "dmlc/logging.h"
#include "ps/internal/message.h"

namespace ps {

// The scheduler has no room for this node yet; Membership::Join may be called anew, by another
// Membership.
struct ComeAgain : public dmlc::Error {
  using dmlc::Error::Error;
};

// The job failed while its nodes gathered, after the scheduler had admitted this one.
struct JobFailed : public dmlc::Error {
  using dmlc::Error::Error;
};

// The scheduler did not say anything in time.
struct NoAnswer : public dmlc::Error {
  using dmlc::Error::Error;
};

// What a probe ends with where the scheduler would admit this node (MembershipSettings::probe).
struct WouldBeAdmitted : public dmlc::Error {
  using dmlc::Error::Error;
};

// How membership reaches other nodes.  A van is behind it, or a test.
class MembershipLinks {
 public:
  virtual ~MembershipLinks() = default;
  virtual Node self() const = 0;
  virtual const Node& scheduler() const = 0;
  // The scheduler has given this node its id.
  virtual void SetSelf(const Node& node) = 0;
  // Makes a connection to `node`, or names the one that came from it.
  virtual void Connect(const Node& node) = 0;
  // Closes it when what was sent before has left.
  virtual void Disconnect(int node_id) = 0;
  // Never blocks.  What cannot be sent is dropped: OnLinkLost tells why.
  virtual void Send(Message* msg) = 0;
  // Connections that are made from now on belong to this incarnation of the job.
  virtual void SetIncarnation(int incarnation) = 0;
};

struct MembershipSettings {
  bool is_scheduler = false;
  double peer_timeout_s = 30;
  double start_timeout_s = 30;
  int workers = -1;  // that the job should have; -1: whatever the scheduler says
  int servers = -1;
  int rank = -1;        // of a worker; -1: the scheduler chooses
  bool rejoin = false;  // a server that outlived a job takes what the next one brings
  // Scheduler: outlives failures, and takes as many workers as the first one of each incarnation
  // says.  Server: takes any number of workers.
  bool keep = false;
  // Such a scheduler gives up when no worker comes for so long after a failure; 0: never.
  double keep_timeout_s = 1800;
  int link_mbps = 0;  // of a worker's network card; 0: what the card says
  // More than 0: Join asks whether so many nodes like this one would be admitted, and joins
  // nothing; a scheduler admits nobody.
  int probe = 0;

  // BYTEPS_PEER_TIMEOUT_S, BYTEPS_START_TIMEOUT_S, DMLC_ROLE, DMLC_NUM_WORKER,
  // DMLC_NUM_SERVER, DMLC_WORKER_ID, BYTEPS_REJOIN, BYTEPS_LINK_GBPS, BYTEPS_KEEP,
  // BYTEPS_KEEP_TIMEOUT_S and BYTEPS_PROBE.
  static MembershipSettings FromEnvironment();
};

// How a worker leaves.
struct Farewell {
  bool suspend = false;  // it will come back
  std::string failure;   // why its process ends, if not because its work is done
  std::string error;     // the first operation that failed in it, though it went on
};

// How often nodes and scheduler hear of each other.
double HeartbeatSeconds(double peer_timeout_s);

struct MembershipEvent {
  enum Kind {
    kFailed,    // the job cannot go on; `reason` says why
    kNodeLeft,  // the worker of `rank` left and will send nothing more; to servers and scheduler
    kEnded,     // every worker left; `suspended` tells whether they come back
    kReported,  // scheduler: `node_id` sent `report`
    kListens,   // this process is `node`, and others can connect to it
    kWelcomed,  // the scheduler admitted this process as `node`; others may be missing
    kAdmitted,  // scheduler: `node` is in the job, which has the numbers below now
    kComplete,  // scheduler: nobody is missing
  };
  Kind kind;
  int rank = -1;
  bool suspended = false;
  // Of kFailed, on a scheduler that goes on: the incarnation that it waits for now.  0: none.
  int next_incarnation = 0;
  std::string reason;
  // The place in the source that found a failure.
  const char* file = "";
  int line = 0;
  Node node;
  // Of kAdmitted, kComplete, and kNodeLeft on the scheduler.
  int incarnation = 0;
  int workers = 0;
  int servers = 0;
  int expected_workers = -1;
  int expected_servers = -1;
  int node_id = Node::kEmpty;
  std::string report;
};

// The job as the scheduler sees it.
struct JobView {
  enum Phase { kGathering, kRunning, kFailed, kEnded };
  struct Peer {
    Node node;
    double silent_s = 0;  // since it was last heard of
    bool left = false;
  };
  Phase phase = kGathering;
  int incarnation = 1;
  std::string failure;  // of this incarnation; while it gathers, of the one before
  int workers = -1;     // that the job should have; -1: not known yet
  int servers = -1;
  std::vector<Peer> peers;
  std::string missing;  // while it gathers: "worker 3, worker 7, 2 servers"
};

class Membership {
 public:
  // Called in the receiving thread or the timer thread, with no lock held; must
  // not block and must not stop the van.
  using Listener = std::function<void(const MembershipEvent&)>;

  // `links` outlives this.  A scheduler admits nodes from now on: it listens before it joins.
  Membership(MembershipLinks* links, const MembershipSettings& settings, Listener listener);
  ~Membership();

  // On the scheduler: begins to watch who is in the job, and returns.  On another node:
  // registers and blocks until every node has.  Throws dmlc::Error when the scheduler refuses or
  // gives up, NoAnswer when it does not answer, ComeAgain when it would take this node later,
  // and JobFailed when the job failed after it had taken this node.  A probe ends with one of these
  // or with WouldBeAdmitted.
  void Join();

  // On a worker: says goodbye and waits, a few seconds at most, for the answer.  With a failure the
  // job has failed, for all.  An error counts as one where the scheduler keeps the cluster: who has
  // not done all of its work is started again.
  void Leave(const Farewell& farewell);

  // On a server or the scheduler that was told to end: fails the job for the reason that it "was
  // `how`", such as "stopped by order (SIGTERM)", and returns when all were told, after a few
  // seconds at most.  Before a worker came the scheduler just forgets the server.
  void StopByOrder(const std::string& how);

  // From now on heartbeats carry what `report` returns, at most kMaxReport bytes.  It is called
  // by the timer thread with no lock held, and is not called any more after Stop.
  void SetReporter(std::function<std::string()> report);
  static constexpr size_t kMaxReport = 1024;

  // Scheduler: who is in the job now.
  JobView View();

  // Ends the timer thread.  Nothing is sent or reported afterwards.
  void Stop();

  // On a worker that has joined: Mbit/s each way of the slowest worker's network card; 0 where one
  // of them is not known.  The same on all workers.
  int link_mbps();

  // A control message came.  One that its sender must not send is ignored, with a warning for the
  // first one of each sender.  Receiving thread.
  void Handle(const Message& msg);

  // The connection to `node_id` closed.  Receiving thread.
  void OnDisconnect(int node_id);

  // A connection to `node_id` broke, and `how`, while the process at its other end may
  // well live.  What the scheduler has to say of that process goes first; if it is silent,
  // it is told, and the job fails.  `closed`: the other end closed it, which may have more
  // to say of the reason and goes first as well.  Receiving thread.
  void OnLinkLost(int node_id, const std::string& how, bool closed);

  // "worker 1 (10.0.0.3:41234)"; without the address while it is not known.
  std::string NameOf(int node_id);

 private:
  using Clock = AwakeClock;
  // kTurning: a scheduler tells the nodes of a failure, and then waits for others.
  enum class State { kJoining, kActive, kTurning, kFailed, kEnded, kStopped };

  struct Peer {
    Node node;
    Clock::time_point heard;
    bool left = false;
    bool left_to_suspend = false;
    int link_mbps = 0;
  };

  // What a node says of the job when it registers.
  struct Claim {
    int protocol = 0;
    int workers = -1;  // -1: whatever the job has
    int servers = -1;
    int link_mbps = 0;  // of a worker's network card; 0: not known
    int probe = 0;      // it asks for so many nodes, and does not join
  };
  // Whether the sender may send it to this node.
  bool MayHave(const Message& msg);
  static std::string PackClaim(const Claim& claim);
  static bool ParseClaim(const std::string& text, Claim* claim);

  void Send(Control::Command command, int recver, const std::string& body = "",
            const std::vector<Node>& nodes = {});
  void Emit(const MembershipEvent& event);
  void SetIncarnation(int incarnation);
  // The place is that of the call, unless another one is given: what found the failure.
  void EmitFailure(const std::string& reason, int next_incarnation, const char* file, int line);
  void Fail(const std::string& reason, const char* file = __builtin_FILE(),
            int line = __builtin_LINE());
  void TimerLoop();

  // Scheduler's part.
  void Register(const Message& msg);
  // Why this node cannot be admitted; empty: it can, and has its rank and id.  Nothing else
  // changes.  `later`: set when it may be admitted at another time.
  std::string Assign(const Claim& claim, Node* node, bool* later) PS_REQUIRES(mu_);
  std::string ReasonToRefuse(const Node& node, const Claim& claim, bool* later) PS_REQUIRES(mu_);
  // Whether all have come with it.
  bool Admit(const Claim& claim, const Node& node) PS_REQUIRES(mu_);
  bool IsComplete() PS_REQUIRES(mu_);
  void Refuse(const Node& node, const std::string& why, bool later);
  // Sends REFUSED with `body` to a node that is not in the job, and closes its connection.
  void SendAway(const Node& node, const std::string& body);
  void AnswerProbe(const Node& node, const Claim& claim);
  // Why so many nodes like `node` could not be admitted, one after the other; empty: they could.
  std::string VerdictOnProbe(const Node& node, const Claim& claim, bool* later) PS_REQUIRES(mu_);
  void EmitProgress(MembershipEvent::Kind kind, const Node& node);
  void AdmitAll();
  void OnFarewell(int node_id, const std::string& text);
  void OnLeave(int node_id, bool suspend);
  void TellOfDepartures();
  void EndJob();
  // `for_good`: the scheduler is told to end.
  void FailJob(const std::string& reason, bool for_good = false,
               const char* file = __builtin_FILE(), int line = __builtin_LINE());
  void BeginIncarnation();
  // Why nobody needs to be waited for any more; empty: not so.
  std::string ReasonToGiveUp(Clock::time_point now) PS_REQUIRES(mu_);
  // Whether the message is of a node of this incarnation, or of one that wants to be.
  bool IsOfThisIncarnation(const Message& msg);
  std::string WhoIsMissing() PS_REQUIRES(mu_);
  int Count(Node::Role role) PS_REQUIRES(mu_);
  // For servers, and for a worker whose launcher gave it none.
  int FirstFreeRank(Node::Role role) PS_REQUIRES(mu_);
  void CheckPeers(Clock::time_point now);
  // The node is gone, or silent: the job fails.  But before a worker came there is no
  // job that could fail: the scheduler forgets the node.
  void OnLost(int node_id, const std::string& how);
  // The same with all of what happened: "was lost: ...", "was stopped by order (SIGTERM)"; and
  // what happened before.
  void OnGone(int node_id, const std::string& what, const std::string& before = "");
  void OnReport(int node_id, const std::string& report);

  // The other nodes' part.
  void OnAdmission(const Message& msg);
  // Whether `body`, of a REFUSED, answers this node's probe.
  bool OnProbeAnswer(const std::string& body);
  void OnNodeLeft(const Node& node);
  void CheckScheduler(Clock::time_point now);
  void ReportBrokenLink();
  // An invariant was broken in this process, whatever it does: the job fails.  Timer thread.
  void CheckInvariants();
  std::string SchedulerName() const;
  // What comes before the reason why another node is lost: "worker 1 (10.0.0.3) stood still for
  // 40.0 s; " if this process did so a short while ago, and for long; empty otherwise.
  std::string StoodStill() const;

  MembershipLinks* const links_;
  const MembershipSettings settings_;
  const Listener listener_;

  Mutex mu_;
  CondVar cond_;
  State state_ PS_GUARDED_BY(mu_) = State::kJoining;
  std::string failure_
      PS_GUARDED_BY(mu_);  // on a scheduler that keeps the cluster: of the last incarnation
  const char* failure_file_ PS_GUARDED_BY(mu_) = "";  // what found it
  int failure_line_ PS_GUARDED_BY(mu_) = 0;
  int incarnation_ PS_GUARDED_BY(mu_) = 1;
  Clock::time_point incarnation_begun_ PS_GUARDED_BY(mu_);
  bool come_again_ PS_GUARDED_BY(mu_) = false;
  bool would_be_admitted_ PS_GUARDED_BY(mu_) = false;
  std::function<std::string()> reporter_ PS_GUARDED_BY(mu_);
  std::map<int, Peer> peers_ PS_GUARDED_BY(mu_);  // by node id; on the scheduler without itself
  int expected_workers_ PS_GUARDED_BY(mu_) = 0;
  int expected_servers_ PS_GUARDED_BY(mu_) = 0;
  bool welcomed_ PS_GUARDED_BY(mu_) = false;
  bool left_acknowledged_ PS_GUARDED_BY(mu_) = false;
  int link_mbps_ PS_GUARDED_BY(mu_) = 0;
  Clock::time_point scheduler_heard_ PS_GUARDED_BY(mu_);
  bool scheduler_closed_ PS_GUARDED_BY(mu_) = false;
  Clock::time_point scheduler_closed_at_ PS_GUARDED_BY(mu_);
  std::string scheduler_closed_how_ PS_GUARDED_BY(mu_);
  // The first connection to another node that broke; none: Node::kEmpty.
  int broken_link_ PS_GUARDED_BY(mu_) = Node::kEmpty;
  std::string broken_how_ PS_GUARDED_BY(mu_);
  Clock::time_point broken_deadline_ PS_GUARDED_BY(mu_);  // for others to speak
  bool broken_reported_ PS_GUARDED_BY(mu_) = false;
  Clock::time_point last_arrival_ PS_GUARDED_BY(mu_);  // scheduler: when the last node came
  bool any_worker_ PS_GUARDED_BY(mu_) = false;
  std::vector<Node> departed_ PS_GUARDED_BY(mu_);  // scheduler: servers do not know yet
  Clock::time_point departed_due_ PS_GUARDED_BY(mu_);
  int refused_ PS_GUARDED_BY(mu_) = 0;
  std::set<int> warned_of_ PS_GUARDED_BY(mu_);  // senders of what they must not send
  std::atomic<bool> over_{false};               // the user has heard of the end
  std::atomic<int> last_incarnation_{0};        // that the links know of; of the scheduler
  uint64_t broken_invariants_;                  // that this job has failed for, or an earlier one
  std::thread timer_;
};

}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_MEMBERSHIP_H_
