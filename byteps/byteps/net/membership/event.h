// Events that membership tells its process, and the nodes that they name.
#ifndef BYTEPS_NET_MEMBERSHIP_EVENT_H_
#define BYTEPS_NET_MEMBERSHIP_EVENT_H_

#include <cstddef>
#include <string>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/net/membership/replica_view.h"

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

}  // namespace ps

#endif  // BYTEPS_NET_MEMBERSHIP_EVENT_H_
