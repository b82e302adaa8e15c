// The scheduler's side: admits nodes, watches them, and tells the others when one is lost or has
// left.
#ifndef BYTEPS_NET_MEMBERSHIP_SCHEDULER_MEMBERSHIP_H_
#define BYTEPS_NET_MEMBERSHIP_SCHEDULER_MEMBERSHIP_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "byteps/base/awake_clock.h"
#include "byteps/base/mutex.h"
#include "byteps/recovery/scheduler/accounts.h"
#include "byteps/net/membership/announcer.h"
#include "byteps/net/membership/event.h"
#include "byteps/net/membership/heartbeat_thread.h"
#include "byteps/net/membership/ignored_senders.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/membership_links.h"
#include "byteps/net/membership/membership_settings.h"
#include "byteps/net/membership/refusal.h"
#include "byteps/recovery/scheduler/replica_table.h"
#include "byteps/net/membership/roster.h"
#include "ps/internal/message.h"

namespace ps {
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

 private:
  using Clock = AwakeClock;
  using Refusal = membership::Refusal;
  // kTurning: the nodes are told of a failure, and then others are waited for.
  enum class State { kActive, kTurning, kFailed, kEnded, kStopped };

  std::string Name() const { return "the " + membership::NameOfScheduler(*links_); }
  // Tells the links.
  void SetIncarnation(int incarnation);
  void EmitProgress(MembershipEvent::Kind kind, const Node& node);

  // Nodes that come (scheduler_arrivals.cc).
  void Register(const Message& msg);
  // Why nobody is admitted now.
  Refusal WhyClosed() PS_REQUIRES(mu_);
  // A server that listens where not all workers can reach it; empty: there is none.
  std::string UnreachableServer() PS_REQUIRES(mu_);
  // Who is complete with a node that came.
  struct Gathered {
    bool all = false;
    int replica = -1;       // that comes late
    bool replaces = false;  // it is a server, in the place of one that was lost
  };
  Gathered Admit(const membership::Claim& claim, const Node& node) PS_REQUIRES(mu_);
  // `replica`: its workers alone; -1: everybody.
  void AdmitAll(int replica);
  // To whom nodes may have to connect again, over another NIC.
  std::vector<Node> SelfIfOnSeveralNics() const;
  // What ADD_NODE says.  Of what is vacant the node is told then.
  std::string BeginningOf(bool late) PS_REQUIRES(mu_);
  void Refuse(const Node& node, const Refusal& refusal);
  // Sends REFUSED with `body` to a node that is not in the job, and closes its connection.
  void SendAway(const Node& node, const std::string& body);
  // A node asks whether it would be admitted, and nothing changes.
  void AnswerProbe(const Node& node, const membership::Claim& claim);

  // Nodes of a job that another scheduler began, and that died (scheduler_return.cc).
  //
  // A node comes back.
  void Return(const Node& node, const membership::Claim& claim, const membership::Account& account);
  Refusal WhyNoReturn(const Node& node, const membership::Claim& claim,
                      const membership::Account& account) PS_REQUIRES(mu_);
  // Who has to go, since this node returns.
  std::vector<Node> MakeRoom(const Node& node, const membership::Account& account) PS_REQUIRES(mu_);
  // What a node says waits until the others have come.
  bool HoldBack(const Message& msg) PS_REQUIRES(mu_);
  // All have come, or it is too late for those that have not.
  void GoOn(bool late);
  // The workers whose LEAVE was held back, if no other worker stays: then the job is over, and a
  // node that has not come may have heard so.  Else none.
  std::vector<Node> TakeLeavers(const std::vector<Message>& held, const std::vector<int>& missing)
      PS_REQUIRES(mu_);
  // Makes the roster and the replicas of what was told.  The nodes that are of them no more.
  std::vector<Node> Rebuild(const std::vector<int>& missing) PS_REQUIRES(mu_);
  void RebuildServers(std::vector<Node>* strays) PS_REQUIRES(mu_);
  // Tells nodes again what has become of servers: some may not have heard it.
  void TellServers();
  // A worker may go once all servers know that it does: they tell the next scheduler.
  void AskServers(const Node& leaver) PS_REQUIRES(mu_);
  void OnLeftKnown(int server, int rank);
  // Those of whom all servers know.
  void LetKnownGo();
  // A server is lost: the next one of its place does not know.
  void ForgetKnown(int server) PS_REQUIRES(mu_);

  // Nodes that leave.
  void OnFarewell(int node_id, const std::string& text);
  void OnLeave(int node_id, bool suspend);
  // Servers are to be told that it has left.
  void Depart(const Node& node) PS_REQUIRES(mu_);
  void TellOfDepartures();
  void EndJob();

  // Nodes that are lost.
  //
  // The node is gone, or silent: the job fails.  But before a worker came there is no
  // job that could fail: the scheduler forgets the node.
  void OnLost(int node_id, const std::string& how);
  // The same with all of what happened: "was lost: ...", "was stopped by SIGTERM"; and
  // what happened before.
  void OnGone(int node_id, const std::string& what, const std::string& before = "");
  // A node cannot go on, for a reason that it or a server, which names it, says.
  void OnFailure(const Message& msg);
  // `for_good`: the scheduler is told to end.  The place is that of the call: what found the
  // failure.
  void FailJob(const std::string& reason, bool for_good = false,
               const char* file = __builtin_FILE(), int line = __builtin_LINE());
  void BeginIncarnation();

  // Servers that are lost while the job goes on (scheduler_servers.cc).
  //
  // Another one may take its place.  False: the job cannot go on without it.
  bool LoseServer(int node_id, const std::string& reason);
  // Tells the others, and it, that it has the place of one that was lost.
  void ReplaceServer(const Node& node);
  // Of several lost servers' places it gets the one that has been vacant for longest: the job ends
  // soonest without it.
  void AssignVacancy(Node* server) PS_REQUIRES(mu_);
  // A worker that has left and is to stay for others has not.  False: it is none.
  bool LoseLeaver(int node_id);
  // Workers that have left need not stay any longer for those that have not.
  void LetGo(Clock::time_point now);
  // A node says that its link with a server broke: one of them is gone, or cannot be reached.  Of
  // replicas and of two servers it is that node, if the server is heard from now on; else it is the
  // server.  It is also the server if most replicas say so.  False: that is not decided here.
  bool AccuseServer(int accuser, const Node& server, const std::string& reason);
  // A server says that of a worker.  False: that is not decided here.
  bool AccuseWorker(int server, int worker, const std::string& reason);
  // Whether most replicas have lost their links with this server lately, as now that of this
  // worker.
  bool BreaksWithMost(int server, int worker) PS_REQUIRES(mu_);
  // The server is heard.  False: it is lost all the same.
  bool Acquit(int server);
  void Condemn(Clock::time_point now);

  // Workers that fail one after the other (scheduler_trials.cc).
  //
  // A worker has said that it failed.  If links with others are broken at that moment, one of these
  // may have ended before, and this worker noticed: the verdict waits until they are lost or there
  // again.  False: it does not wait.
  bool HoldFailure(int worker, const std::string& what);
  void DecideHeld(Clock::time_point now);
  // Nodes whose links are broken, `but` for some.
  std::vector<int> BrokenLinks(const std::set<int>& but);
  // What is said, after why the node `lost` is gone, of a failure that is held.
  std::string ThenFailed(int lost) PS_REQUIRES(mu_);
  // Why no other server is waited for any more; empty: not so.
  std::string ReasonNotToReplace(Clock::time_point now) PS_REQUIRES(mu_);
  void EmitServer(MembershipEvent::Kind kind, const Node& node, const std::string& reason);
  // Who hears of servers that are lost, or replaced by this one.
  std::vector<int> ToTellOfServers(int server) PS_REQUIRES(mu_);
  // Of the places that are vacant.
  std::vector<std::string> LostWords() PS_REQUIRES(mu_);
  // Of all places that were lost, with the node that has each now, if it is known.
  struct ServerWord {
    int server;
    std::string text;
    std::vector<Node> nodes;
  };
  std::vector<ServerWord> ServerWords() PS_REQUIRES(mu_);
  // With backups, those with which a server has links.
  std::vector<Node> NeighborsOf(int server) PS_REQUIRES(mu_);

  // Replicas (scheduler_servers.cc).
  //
  // The replica of a worker that is gone is removed.  False: the job cannot go on without it.
  bool LoseReplica(int node_id, const std::string& reason);
  // Whether workers of another replica go on, or have done all there was to do.
  bool OthersGoOn(int replica) PS_REQUIRES(mu_);
  // Whether this worker is in the job, and its replica takes part in sums.
  bool IsOfPresent(int rank) PS_REQUIRES(mu_);
  // Every worker that takes part has left, and, to be over, may have gone.
  bool HaveAllLeft() PS_REQUIRES(mu_);
  bool IsOver() PS_REQUIRES(mu_);
  // Tells all nodes how it is now, and servers whose connections they have to close.
  void TellReplicas(const std::string& news);
  void OnMemberWord(int sender, const std::string& text);
  // Removes replicas of which some workers came, and others have not in time.
  void CheckComing(Clock::time_point now);

  void OnReport(int node_id, const std::string& report);

  // The heartbeats' thread.
  std::optional<Clock::time_point> NextDue();
  void OnBeat(Clock::time_point now);
  // An invariant was broken in this process, whatever it does: the job fails.
  void CheckInvariants();
  void CheckPeers(Clock::time_point now);
  // Why the nodes that are missing are not waited for any more; empty: they are.
  std::string ReasonNotToStart(Clock::time_point now) PS_REQUIRES(mu_);
  // Why nobody needs to be waited for any more; empty: not so.
  std::string ReasonToGiveUp(Clock::time_point now) PS_REQUIRES(mu_);

  MembershipLinks* const links_;
  const MembershipSettings settings_;
  Announcer announcer_;
  membership::IgnoredSenders ignored_;
  uint64_t broken_invariants_;            // that this job has failed for, or an earlier one
  std::atomic<int> last_incarnation_{0};  // that the links know of

  Mutex telling_mu_;  // so that what is told of replicas is sent in order; before mu_
  Mutex mu_;
  State state_ PS_GUARDED_BY(mu_) = State::kActive;
  // With MembershipSettings::keep: of the last generation.
  std::string failure_ PS_GUARDED_BY(mu_);
  int incarnation_ PS_GUARDED_BY(mu_) = 1;
  Clock::time_point incarnation_begun_ PS_GUARDED_BY(mu_);
  Roster roster_ PS_GUARDED_BY(mu_);
  ReplicaTable replicas_ PS_GUARDED_BY(mu_);
  std::vector<Node> removed_ PS_GUARDED_BY(mu_);  // of which servers were not told yet
  struct Vacancy {
    Clock::time_point since;
    std::string reason;  // what became of the server
  };
  std::map<int, Vacancy> vacancies_ PS_GUARDED_BY(mu_);  // by node id
  membership::Turns turns_ PS_GUARDED_BY(mu_);           // of servers' places
  struct Accusation {
    int accuser;
    std::string reason;
    Clock::time_point due;  // the server is gone, if nothing is heard of it
  };
  struct HeldFailure {
    int worker = 0;  // the first that failed
    std::string what;
    std::set<int> failed;    // it, and others since
    std::set<int> suspects;  // whose links were broken when it failed
    Clock::time_point due;   // when to look again
    Clock::time_point latest;
  };
  // Of servers, by node id.
  struct Trials {
    std::optional<HeldFailure> held;
    std::multimap<int, Accusation> accusations;
    std::map<int, std::map<int, Clock::time_point>> broken_links;  // when, by replica
  };
  Trials trials_ PS_GUARDED_BY(mu_);
  Clock::time_point last_replaced_ PS_GUARDED_BY(mu_);  // when one was filled last
  bool any_worker_ PS_GUARDED_BY(mu_) = false;
  Clock::time_point last_arrival_ PS_GUARDED_BY(mu_);
  // Workers that left.
  struct Departures {
    std::vector<Node> untold;  // of which servers were not told yet
    Clock::time_point due;
    struct Leaver {
      Node node;
      std::set<int> known;  // to these servers
    };
    std::map<int, Leaver> asked;  // by node id: they wait until all servers know
  };
  Departures departures_ PS_GUARDED_BY(mu_);
  // Of the job of a scheduler that died.
  struct Takeover {
    int life = 1;  // of this scheduler: more than that of each before it
    bool gathers = false;
    Clock::time_point since;
    JobSize size;
    membership::Accounts accounts;
    std::vector<Message> held;  // that nodes sent meanwhile
  };
  Takeover takeover_ PS_GUARDED_BY(mu_);
  int refused_ PS_GUARDED_BY(mu_) = 0;

  HeartbeatThread heartbeats_;
};

}  // namespace ps

#endif  // BYTEPS_NET_MEMBERSHIP_SCHEDULER_MEMBERSHIP_H_
