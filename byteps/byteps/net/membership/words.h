// Bodies of the messages between scheduler and nodes. A REFUSED, and the version at the head of a
// registration, are text, so that nodes of other versions can read them.
#ifndef BYTEPS_NET_MEMBERSHIP_WORDS_H_
#define BYTEPS_NET_MEMBERSHIP_WORDS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <variant>

#include "byteps/net/membership/event.h"
#include "byteps/net/membership/replica_view.h"
#include "byteps/net/membership/word_codec.h"

namespace ps {

inline auto Fields(ReplicaView& view) {
  return std::tie(view.workers, view.epoch, view.present, view.waiting, view.ready_epochs,
                  view.donors, view.news);
}
inline auto Fields(Farewell& farewell) {
  return std::tie(farewell.suspend, farewell.failure, farewell.error);
}
// Returns whether the view describes replicas, or correctly says that there are none.
bool IsValid(const ReplicaView& view);

namespace membership {

constexpr int kProtocol = 18;
// Prefix of a REFUSED body if the refused node may try again later.
constexpr char kAgain[] = "again: ";
// Prefix of a REFUSED body that answers a probe: the node would be admitted.
constexpr char kWould[] = "would: ";

// View of the job that a registering node sends in ADD_NODE.
struct Claim {
  int protocol = 0;
  int workers = -1;  // number of workers that the job should have; -1: any number
  int servers = -1;
  int link_mbps = 0;  // rate of a worker's NIC in Mbit/s; 0: unknown
  int probe = 0;      // if positive: the node only asks whether this many nodes would be admitted
  int replicas = 0;   // from a worker: number of replicas of its model; 0: unset
  bool backups = false;  // servers have links with their neighbors
};
inline auto Fields(Claim& claim) {
  return std::tie(claim.workers, claim.servers, claim.link_mbps, claim.probe, claim.replicas,
                  claim.backups);
}
bool IsValid(const Claim& claim);

// Turns of the servers, by rank. A turn counts how often a rank has lost its server or got another
// one. So it is odd while the rank has no server. Ranks with turn 0 are left out.
using Turns = std::map<int, int>;
int TurnOf(const Turns& turns, int rank);
bool IsVacant(const Turns& turns, int rank);

// A node's report to a scheduler that takes over the job of a dead scheduler
// (docs/design/losses.md).
struct Account {
  uint64_t job = 0;          // number of the job
  int scheduler_number = 0;  // number of the last scheduler that the node knows; 0: the node is new
  bool is_late = false;      // from a worker: its replica came to a running job
  std::set<int> left;        // from a server: ranks of workers that left in order
  Turns turns;               // turns of servers' places that the node knows
  ReplicaView replicas;      // the latest view that the node knows; empty if it knows none
};
inline auto Fields(Account& account) {
  return std::tie(account.job, account.scheduler_number, account.is_late, account.left,
                  account.turns, account.replicas);
}
bool IsValid(const Account& account);

// Body of ADD_NODE to the scheduler.
struct Registration {
  Claim claim;
  Account account;
};
inline auto Fields(Registration& registration) {
  return std::tie(registration.claim, registration.account);
}
std::string PackRegistration(const Registration& registration);
// Parses a registration. Of another protocol version it parses only the version. The version is -1
// if the text is no registration.
Registration ParseRegistration(const std::string& text);

// Body of ADD_NODE to nodes.
struct Beginning {
  int link_mbps = 0;  // rate of the slowest worker's NIC in Mbit/s
  bool late = false;  // the receiving worker's replica comes to a running job
  Turns turns;        // turns that the receiving node need not be told again
};
inline auto Fields(Beginning& beginning) {
  return std::tie(beginning.link_mbps, beginning.late, beginning.turns);
}
bool IsValid(const Beginning& beginning);

// Body of WELCOME.
struct Welcome {
  int generation = 1;        // generation of the job
  int scheduler_number = 0;  // number of the scheduler (ScheduledJob::scheduler_number)
};
inline auto Fields(Welcome& welcome) {
  return std::tie(welcome.generation, welcome.scheduler_number);
}
inline bool IsValid(const Welcome& welcome) { return welcome.scheduler_number > 0; }

// Body of JOB_END.
struct End {
  bool suspended = false;  // the workers come back
};
inline auto Fields(End& end) { return std::tie(end.suspended); }

// ----- LEAVE: a Farewell from a worker, or a Stopped from a server
//
// Message of a server that was told to stop.
struct Stopped {
  std::string how;  // way in which it was stopped, such as "stopped by SIGTERM"
};
inline auto Fields(Stopped& stopped) { return std::tie(stopped.how); }
using Leave = std::variant<Farewell, Stopped>;

struct Departure {
  // The node's end, such as "was stopped by SIGTERM" or "failed: exit status 3". "" if its work is
  // done.
  std::string failure;
  bool suspend = false;
};
// Returns how a node has ended, from its LEAVE. `errors_count`: whether a worker with a failed
// operation counts as failed.
Departure DepartureOf(const Leave& leave, bool errors_count);

// ----- MEMBERS: a ReplicaView to nodes, or one of the following messages
//
// From a server: it has applied all changes of replicas up to this epoch.
struct Acknowledged {
  int epoch = 0;
};
inline auto Fields(Acknowledged& word) { return std::tie(word.epoch); }
// Sent by a worker of a replica that came to a running job, when the worker can take part.
struct Ready {};
inline auto Fields(Ready& /*word*/) { return std::tuple<>(); }
// Sent by a worker: all present workers are between two steps, so the replica may join.
struct Admit {
  int replica = 0;
  int ready_epoch = 0;  // see ReplicaView
};
inline auto Fields(Admit& word) { return std::tie(word.replica, word.ready_epoch); }
// Sent by a server: other workers wait for the worker of this rank. The scheduler passes this on to
// that worker.
struct Awaited {
  int rank = 0;
  int round = 0;
  std::string tensor;
};
inline auto Fields(Awaited& word) { return std::tie(word.rank, word.round, word.tensor); }
// Sent by a server: the worker of this rank is late, and the scheduler should remove its replica.
struct Late {
  int rank = 0;
  int epoch = 0;  // the latest epoch that the server knows
  std::string why;
};
inline auto Fields(Late& word) { return std::tie(word.rank, word.epoch, word.why); }
// Sent to nodes: the server of this rank is lost, and the job waits for a replacement.
struct ServerLost {
  int rank = 0;
  int turn = 0;  // turn of the server's place
  std::string reason;
};
inline auto Fields(ServerLost& word) { return std::tie(word.rank, word.turn, word.reason); }
// Sent to nodes: the node in this message replaces the lost server of this rank.
struct ServerReplaced {
  int rank = 0;
  int turn = 0;     // turn of the server's place
  int servers = 0;  // number of servers
};
inline auto Fields(ServerReplaced& word) { return std::tie(word.rank, word.turn, word.servers); }
// Sent by a server, if a scheduler may return: it knows that the worker of this rank has left.
struct LeftKnown {
  int rank = 0;
};
inline auto Fields(LeftKnown& word) { return std::tie(word.rank); }
bool IsValid(const Awaited& word);
bool IsValid(const Late& word);
bool IsValid(const ServerLost& word);
bool IsValid(const ServerReplaced& word);
bool IsValid(const LeftKnown& word);
using MemberWord = std::variant<ReplicaView, Acknowledged, Ready, Admit, Awaited, Late, ServerLost,
                                ServerReplaced, LeftKnown>;

}  // namespace membership
}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_WORDS_H_
