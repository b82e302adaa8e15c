// What membership tells its process of the job, and the process of itself; and the rhythm in which
// nodes hear of each other.
#ifndef BYTEPS_NET_MEMBERSHIP_EVENT_H_
#define BYTEPS_NET_MEMBERSHIP_EVENT_H_

#include <atomic>
#include <cstddef>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/base/mutex.h"
#include "byteps/base/process.h"

namespace ps {

// What membership tells its process of the job, and the process of itself.
struct Node;

// A node, as far as others need to know of it.
struct NodeInfo {
  byteps::core::Role role = byteps::core::Role::kServer;
  int id = -1;
  std::string address;  // "10.0.0.2:40123"; without a port of a worker, which listens nowhere
  int nics = 1;         // that carry its data
};
NodeInfo InfoOf(const Node& node);
// "10.0.0.2:40123", "10.0.0.2:40123 on 2 NICs"
std::string PlaceOf(const NodeInfo& node);

// Bytes that a node reports of itself with a heartbeat.
constexpr size_t kMaxReport = 1024;

// Which replicas of a model are in the job (docs/design/replicas.md), as the scheduler tells it.
struct ReplicaView {
  int workers = 0;      // of all replicas together; equally many are of each
  int epoch = 0;        // grows with each change
  std::string present;  // a '1' for each replica that takes part in sums, a '0' for each other one
  std::string waiting;  // a '1' for each that is ready to join, when the others say so
  // The life of each: the epoch in which it became ready to join; 0: it was there from the
  // beginning.
  std::vector<int> lives;
  // Which other one gives each what it lacks; -1: it was there from the beginning, or has not
  // joined yet.  The scheduler chooses it, since nodes may hear at different times of one that is
  // removed.
  std::vector<int> donors;
  std::string news;  // what has changed, for the log; may be empty

  int count() const { return static_cast<int>(present.size()); }
  bool IsPresent(int replica) const { return present[replica] == '1'; }
  // The ranks of a replica are those from this one on.
  int FirstRank(int replica) const { return replica * (workers / count()); }
  // Of replicas that are not present.
  std::set<int> AbsentRanks() const;
};

struct MembershipEvent {
  enum Kind {
    kFailed,    // the job cannot go on; `reason` says why
    kNodeLeft,  // the worker of `rank` left and will send nothing more; to servers and scheduler
    kEnded,     // every worker left; `suspended` tells whether they come back
    kReported,  // scheduler: `node`, of which only the id is set, sent `report`
    kListens,   // this process is `node`, and others can connect to it
    kWelcomed,  // the scheduler admitted this process as `node`; others may be missing
    kAdmitted,  // scheduler: `node` is in the job, which has the numbers below now
    kComplete,  // scheduler: nobody is missing
    kReplicas,  // `replicas` has changed
    kAwaited,   // a worker: others wait for its push of `round` of the tensor `report`
    // A worker, or with backups (MembershipSettings) a server: the server of `rank` is lost,
    // `reason` says how, and the job waits for another one; it is there, and a neighbor may send to
    // it from now on.  On the scheduler, too.  A server that comes hears of those that are lost
    // then.
    kServerLost,
    kServerReplaced,
  };
  Kind kind;
  int rank = -1;
  bool suspended = false;
  // Of kFailed, on a scheduler that goes on: the generation that it waits for now.  0: none.
  int next_incarnation = 0;
  std::string reason;
  // The place in the source that found a failure.
  const char* file = "";
  int line = 0;
  NodeInfo node;
  // Of kAdmitted, kComplete, and kNodeLeft on the scheduler.
  int incarnation = 0;
  int workers = 0;
  int servers = 0;
  int expected_workers = -1;
  int expected_servers = -1;
  std::string report;
  int round = 0;
  ReplicaView replicas;
};

// How a worker leaves.
struct Farewell {
  bool suspend = false;  // it will come back
  std::string failure;   // why its process ends, if not because its work is done
  std::string error;     // the first operation that failed in it, though it went on
};

// The job as the scheduler sees it.
struct JobView {
  enum Phase { kGathering, kRunning, kFailed, kEnded };
  struct Peer {
    NodeInfo node;
    double silent_s = 0;  // since it was last heard of
    bool left = false;
  };
  Phase phase = kGathering;
  int incarnation = 1;
  std::string failure;  // of this generation; while it gathers, of the one before
  int workers = -1;     // that the job should have; -1: not known yet
  int servers = -1;
  std::vector<Peer> peers;
  std::string missing;   // while it gathers: "worker 3, worker 7, 2 servers"
  ReplicaView replicas;  // without any: the job is the only one that trains its model
};

// Hands a job's events to its process.  Any thread.  Checks that a job ends once.
class Announcer {
 public:
  using Listener = std::function<void(const MembershipEvent&)>;

  // Without a listener nobody is told.
  explicit Announcer(Listener listener);

  void Tell(const MembershipEvent& event);
  // A kFailed.  `next_incarnation`: see MembershipEvent.
  void TellFailure(const std::string& reason, int next_incarnation, const char* file, int line);

 private:
  const Listener listener_;
  std::atomic<bool> over_{false};  // the listener has heard of the end
};

// The rhythm in which scheduler and nodes hear of each other.

// Between two heartbeats.
double HeartbeatSeconds(double peer_timeout_s);

// The thread of a membership.  It sends heartbeats, looks for peers that are silent, does what is
// due at a certain time, and feeds the process's StallWatch.
class HeartbeatThread {
 public:
  using Clock = AwakeClock;

  // What the thread calls, with no lock held.
  struct Tasks {
    // When `on_due` is to be called; time_point::max(): not yet.  Nothing: the job is not watched
    // now, and the thread sleeps until Wake.
    std::function<std::optional<Clock::time_point>()> next_due;
    std::function<void(Clock::time_point now)> on_due;
    // At each heartbeat.
    std::function<void(Clock::time_point now)> on_beat;
  };

  HeartbeatThread(double heartbeat_s, Tasks tasks);
  // Stop was called, if Start was.
  ~HeartbeatThread() = default;

  void Start();
  // What next_due returns has changed.  Any thread, before Start and after Stop as well.
  void Wake();
  // Returns when the thread has ended; it must not be this one.
  void Stop();

 private:
  void Run();

  const double heartbeat_s_;
  const Tasks tasks_;
  Mutex mu_;
  CondVar cond_;
  bool woken_ PS_GUARDED_BY(mu_) = false;
  bool stopped_ PS_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

// What comes before the reason why another process is lost: "worker 1 (10.0.0.3) stood still for
// 40.0 s; " if this process, which is called `self`, did so a short while ago, and for long; empty
// otherwise.
std::string StoodStill(const std::string& self, double peer_timeout_s);

}  // namespace ps

#endif  // BYTEPS_NET_MEMBERSHIP_EVENT_H_
