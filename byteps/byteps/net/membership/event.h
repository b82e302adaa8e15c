// Events that membership delivers to its process, and the nodes in them.
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
  std::string address;  // "10.0.0.2:40123"; a worker's has no port, since it does not listen
  int nics = 1;         // number of NICs for its data
};
NodeInfo InfoOf(const Node& node);
// Returns "10.0.0.2:40123", or "10.0.0.2:40123 on 2 NICs".
std::string PlaceOf(const NodeInfo& node);

// Limit of the report that a node sends with a heartbeat, in bytes.
constexpr size_t kMaxReport = 1024;

struct MembershipEvent {
  enum Kind {
    kFailed,    // the job cannot continue; `reason` says why
    kNodeLeft,  // to servers and the scheduler: the worker of `rank` left, and sends nothing more
    kEnded,     // all workers left; `suspended`: they will come back
    kReported,  // scheduler: `node` (only its id is set) sent `report`
    kListens,   // this process is `node`, and accepts connections
    kWelcomed,  // the scheduler admitted this process as `node`; other nodes may be missing
    kAdmitted,  // scheduler: `node` joined; the numbers below describe the job now
    kComplete,  // scheduler: all nodes are present
    kReplicas,  // `replicas` has changed
    kAwaited,   // to a worker: others wait for its push of `round` of the tensor `report`
    // Sent to workers, the scheduler, and with backups (MembershipSettings) to servers.
    // kServerLost: the server of `rank` is lost, for `reason`, and the job waits for a replacement.
    // kServerReplaced: the replacement is there, and neighbors may send to it. A new server gets
    // kServerLost for each server that is lost when it joins.
    kServerLost,
    kServerReplaced,
  };
  Kind kind;
  int rank = -1;
  bool suspended = false;
  // kFailed on a scheduler that continues: the generation that it waits for. 0: none.
  int next_incarnation = 0;
  std::string reason;
  // Source location that found the failure.
  const char* file = "";
  int line = 0;
  NodeInfo node;
  // The job's numbers, for kAdmitted, kComplete, and kNodeLeft on the scheduler.
  int incarnation = 0;
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
  bool suspend = false;  // it will come back
  std::string failure;   // why its process ends, unless its work is done
  std::string error;     // the first failed operation of a process that continued
};

// The scheduler's view of the job.
struct JobView {
  enum Phase { kGathering, kRunning, kFailed, kEnded };
  struct Peer {
    NodeInfo node;
    double silent_s = 0;  // seconds since its last message
    bool left = false;
  };
  Phase phase = kGathering;
  int incarnation = 1;
  std::string failure;  // failure of this generation; while gathering, of the previous one
  int workers = -1;     // number the job should have; -1: not known yet
  int servers = -1;
  std::vector<Peer> peers;
  std::string missing;   // while gathering: "worker 3, worker 7, 2 servers"
  ReplicaView replicas;  // empty: the job alone trains its model
};

}  // namespace ps

#endif  // BYTEPS_NET_MEMBERSHIP_EVENT_H_
