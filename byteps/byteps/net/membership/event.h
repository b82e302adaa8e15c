// Events that membership delivers to its process, and the descriptions of nodes in events.
#ifndef BYTEPS_NET_MEMBERSHIP_EVENT_H_
#define BYTEPS_NET_MEMBERSHIP_EVENT_H_

#include <cstddef>
#include <string>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/net/membership/replica_view.h"

namespace ps {

struct Node;

// The public part of a node's record.
struct NodeInfo {
  byteps::core::Role role = byteps::core::Role::kServer;
  int id = -1;
  std::string address;  // "10.0.0.2:40123"; without a port for a worker, which does not listen
  int nics = 1;         // number of NICs over which the node sends data
};
NodeInfo InfoOf(const Node& node);
// Returns text such as "10.0.0.2:40123", or "10.0.0.2:40123 on 2 NICs".
std::string PlaceOf(const NodeInfo& node);

// Limit of the report that a node sends with a heartbeat, in bytes.
constexpr size_t kMaxReport = 1024;

struct MembershipEvent {
  enum Kind {
    kFailed,    // the job cannot continue; `reason` says why
    kNodeLeft,  // on servers and the scheduler: the worker of `rank` left, and sends nothing more
    kEnded,     // all workers left; `suspended`: the workers will come back
    kReported,  // on the scheduler: `node`, of which only the id is set, has sent `report`
    kListens,   // this process is `node`, and accepts connections
    kWelcomed,  // the scheduler admitted this process as `node`; other nodes may be missing
    kAdmitted,  // on the scheduler: `node` joined; the numbers below describe the job now
    kComplete,  // on the scheduler: all nodes are present
    kReplicas,  // `replicas` has changed
    kAwaited,   // on a worker: other workers wait for its push of `round` of the tensor `report`
    // Sent to workers, the scheduler, and with backups (MembershipSettings) to servers.
    // kServerLost: the server of `rank` is lost, for `reason`, and the job waits for a replacement.
    // kServerReplaced: the replacement has come, and neighbors may send to it. A server that joins
    // gets kServerLost for each server that is lost at that time.
    kServerLost,
    kServerReplaced,
  };
  Kind kind;
  int rank = -1;
  bool suspended = false;
  // For kFailed, on a scheduler that keeps the cluster: generation whose nodes it waits for now.
  // Otherwise 0.
  int next_generation = 0;
  std::string reason;
  // Source location at which the failure was found.
  const char* file = "";
  int line = 0;
  NodeInfo node;
  // Numbers of the job, for kAdmitted, kComplete, and kNodeLeft on the scheduler.
  int generation = 0;
  int workers = 0;
  int servers = 0;
  int expected_workers = -1;
  int expected_servers = -1;
  std::string report;
  int round = 0;
  ReplicaView replicas;
};

// A worker's reasons for leaving.
struct Farewell {
  bool suspend = false;  // the worker will come back
  std::string failure;   // why the worker's process ends; "" if its work is done
  std::string error;     // error of the worker's first failed operation; "" if none has failed
};

// The scheduler's view of the job.
struct JobView {
  enum Phase { kGathering, kRunning, kFailed, kEnded };
  struct Peer {
    NodeInfo node;
    double silent_s = 0;  // seconds since the peer's last message
    bool left = false;
  };
  Phase phase = kGathering;
  int generation = 1;
  std::string failure;  // failure of this generation or, while gathering, of the previous one
  int workers = -1;     // number of workers that the job should have; -1: not known yet
  int servers = -1;
  std::vector<Peer> peers;
  std::string missing;   // missing nodes, such as "worker 3, worker 7, 2 servers", while gathering
  ReplicaView replicas;  // empty: the job alone trains its model
};

}  // namespace ps

#endif  // BYTEPS_NET_MEMBERSHIP_EVENT_H_
