// What membership tells its process of the job, and the process of itself.
#ifndef BYTEPS_NET_MEMBERSHIP_EVENT_H_
#define BYTEPS_NET_MEMBERSHIP_EVENT_H_

#include <string>
#include <vector>

#include "ps/internal/message.h"

namespace ps {

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

}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_EVENT_H_
