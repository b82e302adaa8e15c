// Bodies of the messages between scheduler and nodes. REFUSED, and the version at the head of a
// registration, are text, readable for nodes of other versions.
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
  return std::tie(view.workers, view.epoch, view.present, view.waiting, view.lives, view.donors,
                  view.news);
}
inline auto Fields(Farewell& farewell) {
  return std::tie(farewell.suspend, farewell.failure, farewell.error);
}
// Returns whether the view describes replicas, or validly says that there are none.
bool IsValid(const ReplicaView& view);

namespace membership {

constexpr int kProtocol = 18;
// Prefix of a REFUSED whose receiver may come again.
constexpr char kAgain[] = "again: ";
// Prefix of a REFUSED that answers a probe: the node would be admitted.
constexpr char kWould[] = "would: ";

// A registering node's view of the job, in ADD_NODE.
struct Claim {
  int protocol = 0;
  int workers = -1;  // -1: as the job has
  int servers = -1;
  int link_mbps = 0;     // rate of a worker's NIC; 0: unknown
  int probe = 0;         // asks for this many nodes, and does not join
  int replicas = 0;      // a worker's: number of jobs that train its model; 0: unset
  bool backups = false;  // servers have links with their neighbors
};
inline auto Fields(Claim& claim) {
  return std::tie(claim.workers, claim.servers, claim.link_mbps, claim.probe, claim.replicas,
                  claim.backups);
}
bool IsValid(const Claim& claim);

// Counts, by server rank, how often the place was lost or filled again; ranks with 0 are left out.
// An odd count means that the place is vacant.
using Turns = std::map<int, int>;
int TurnOf(const Turns& turns, int rank);
bool IsVacant(const Turns& turns, int rank);

// A node's report to a scheduler that takes over the job of a dead one (docs/design/losses.md).
struct Account {
  uint64_t job = 0;      // its number
  int life = 0;          // number of the last scheduler that the node knows; 0: it does not return
  bool is_late = false;  // a worker's: its replica came to a running job
  std::set<int> left;    // ranks of workers that left in order; servers know them
  Turns turns;           // known turns of servers' places; a server knows its own
  ReplicaView replicas;  // the latest the node knows; empty: none
};
inline auto Fields(Account& account) {
  return std::tie(account.job, account.life, account.is_late, account.left, account.turns,
                  account.replicas);
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
// Parses a registration; of another protocol only its version. Version -1: not a registration.
Registration ParseRegistration(const std::string& text);

// Body of ADD_NODE to nodes.
struct Beginning {
  int link_mbps = 0;  // rate of the slowest worker's link
  bool late = false;  // this worker's replica comes to a running job
  Turns turns;        // losses that need not be told to this node again
};
inline auto Fields(Beginning& beginning) {
  return std::tie(beginning.link_mbps, beginning.late, beginning.turns);
}
bool IsValid(const Beginning& beginning);

// Body of WELCOME.
struct Welcome {
  int generation = 1;  // generation of the job
  int life = 0;        // the scheduler's number
};
inline auto Fields(Welcome& welcome) { return std::tie(welcome.generation, welcome.life); }
inline bool IsValid(const Welcome& welcome) { return welcome.life > 0; }

// Body of JOB_END.
struct End {
  bool suspended = false;  // the workers come back
};
inline auto Fields(End& end) { return std::tie(end.suspended); }

// ----- LEAVE: a worker's Farewell, or Stopped
//
// A server was told to stop.
struct Stopped {
  std::string how;  // "stopped by SIGTERM"
};
inline auto Fields(Stopped& stopped) { return std::tie(stopped.how); }
using Leave = std::variant<Farewell, Stopped>;

struct Departure {
  // The node's end: "was stopped by SIGTERM", "failed: exit status 3". "": its work is done.
  std::string failure;
  bool suspend = false;
};
// `errors_count`: a worker with a failed operation has not done its work.
Departure DepartureOf(const Leave& leave, bool errors_count);

// ----- MEMBERS: to nodes a ReplicaView, or one of the following
//
// A server has applied all changes of replicas up to this epoch.
struct Acknowledged {
  int epoch = 0;
};
inline auto Fields(Acknowledged& word) { return std::tie(word.epoch); }
// This worker came late, and can take part now.
struct Ready {};
inline auto Fields(Ready& /*word*/) { return std::tuple<>(); }
// This worker and all others that take part are between two steps, so this replica may join.
struct Admit {
  int replica = 0;
  int life = 0;  // life of the replica
};
inline auto Fields(Admit& word) { return std::tie(word.replica, word.life); }
// Others wait for this worker. The scheduler passes the message on to it.
struct Awaited {
  int rank = 0;
  int round = 0;
  std::string tensor;
};
inline auto Fields(Awaited& word) { return std::tie(word.rank, word.round, word.tensor); }
// This worker is late; its replica is to be removed.
struct Late {
  int rank = 0;
  int epoch = 0;  // the latest that the server knows
  std::string why;
};
inline auto Fields(Late& word) { return std::tie(word.rank, word.epoch, word.why); }
// A server is lost; a replacement is awaited.
struct ServerLost {
  int rank = 0;
  int turn = 0;  // turn of the server's place
  std::string reason;
};
inline auto Fields(ServerLost& word) { return std::tie(word.rank, word.turn, word.reason); }
// The node in this message replaces the lost server.
struct ServerReplaced {
  int rank = 0;
  int turn = 0;     // turn of the server's place
  int servers = 0;  // number of servers
};
inline auto Fields(ServerReplaced& word) { return std::tie(word.rank, word.turn, word.servers); }
// A server knows that a worker has left. Sent if a scheduler may return.
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
