// This process's membership in a cluster of scheduler, servers and workers.
#ifndef BYTEPS_CLUSTER_SESSION_H_
#define BYTEPS_CLUSTER_SESSION_H_

#include <functional>
#include <string>

#include "byteps/base/config.h"
#include "ps/internal/message.h"
#include "ps/membership.h"

namespace byteps {
namespace core {

enum class Role { kScheduler, kServer, kWorker };

const char* NameOf(Role role);

struct SessionOptions {
  Role role = Role::kWorker;
  int rank = 0;  // of a worker
  int num_workers = 1;
  int num_servers = 1;
  bool rejoin = false;  // of a server whose last job was suspended
};

// Wraps ps-lite, whose state is one per process: so is the session.
class Session {
 public:
  // Both are called in ps-lite's receiving thread (events also in its timer
  // thread) and must not block.
  using MessageHandler = std::function<void(ps::Message*)>;
  using EventHandler = std::function<void(const ps::MembershipEvent&)>;

  // Joins; blocks until every node is there (the scheduler returns once it
  // listens).  Throws Error, and leaves nothing behind, when that fails in time.
  static void Start(const Config& config, const SessionOptions& options, MessageHandler on_message,
                    EventHandler on_event);

  // A worker tells that it will send nothing more.  See Membership::Leave.
  static void Leave(bool suspend);

  // Closes all connections; no handler runs after it returned.
  static void Stop();

  // False when this process has closed its connections.
  static bool Send(ps::Message* message);

  // Whether what is sent is registered with a device first: see ps/lasting_memory.h.
  static bool RegistersMemory();

  // "host:port" at which this node listens.
  static std::string host();
  static int port();
  // This node's among those of its role, once it has joined.
  static int rank();
  // "server 0 (10.0.0.2:40123)"
  static std::string NameOfServer(int rank);
  static std::string NameOfWorker(int rank);
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_CLUSTER_SESSION_H_
