// Bodies of the messages between a scheduler and its nodes. REFUSED, and the version at the head of
// a registration, are text: nodes of another version read them, too.
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
// Whether it describes replicas, or says that there are none.
bool IsValid(const ReplicaView& view);

namespace membership {

constexpr int kProtocol = 18;
// Prefix of a REFUSED whose receiver may come again.
constexpr char kAgain[] = "again: ";
// Prefix of a REFUSED whose receiver only asked, and would be admitted.
constexpr char kWould[] = "would: ";

// A node's view of the job when it registers, in ADD_NODE.
struct Claim {
  int protocol = 0;
  int workers = -1;  // -1: whatever the job has
  int servers = -1;
  int link_mbps = 0;     // of a worker's network card; 0: not known
  int probe = 0;         // it asks for so many nodes, and does not join
  int replicas = 0;      // of a worker: jobs that train its model; 0: it does not say
  bool backups = false;  // servers have links with each other
};
inline auto Fields(Claim& claim) {
  return std::tie(claim.workers, claim.servers, claim.link_mbps, claim.probe, claim.replicas,
                  claim.backups);
}
bool IsValid(const Claim& claim);

// Counts, by rank, how often the place of a server was lost or given to another; 0 is left out.
// An odd count means that the place is lost.
using Turns = std::map<int, int>;
int TurnOf(const Turns& turns, int rank);
bool IsVacant(const Turns& turns, int rank);

// A node's report to a scheduler that goes on with its job after another one has died
// (docs/design/losses.md).
struct Account {
  uint64_t job = 0;      // its number
  int life = 0;          // of the last scheduler that the node has heard; 0: it does not return
  bool is_late = false;  // of a worker: its replica came to a job that ran already
  std::set<int> left;    // ranks of workers that left in order; servers know
  Turns turns;           // of servers' places, as far as it has heard; a server knows its own
  ReplicaView replicas;  // the last that it has heard of; of no replica: none
};
inline auto Fields(Account& account) {
  return std::tie(account.job, account.life, account.is_late, account.left, account.turns,
                  account.replicas);
}
bool IsValid(const Account& account);

// ADD_NODE, to the scheduler.
struct Registration {
  Claim claim;
  Account account;
};
inline auto Fields(Registration& registration) {
  return std::tie(registration.claim, registration.account);
}
std::string PackRegistration(const Registration& registration);
// Reads a registration, or of another protocol its version alone. Version -1: it is none.
Registration ParseRegistration(const std::string& text);

// ADD_NODE, to nodes.
struct Beginning {
  int link_mbps = 0;  // the rate of the slowest worker's link
  bool late = false;  // this worker's replica comes to a job that has begun
  Turns turns;        // those that this node needs not hear of
};
inline auto Fields(Beginning& beginning) {
  return std::tie(beginning.link_mbps, beginning.late, beginning.turns);
}
bool IsValid(const Beginning& beginning);

// WELCOME.
struct Welcome {
  int generation = 1;  // of the job
  int life = 0;        // of the scheduler
};
inline auto Fields(Welcome& welcome) { return std::tie(welcome.generation, welcome.life); }
inline bool IsValid(const Welcome& welcome) { return welcome.life > 0; }

// JOB_END.
struct End {
  bool suspended = false;  // the workers come back
};
inline auto Fields(End& end) { return std::tie(end.suspended); }

// ----- LEAVE: a worker's Farewell, or

// A server was told to end.
struct Stopped {
  std::string how;  // "stopped by SIGTERM"
};
inline auto Fields(Stopped& stopped) { return std::tie(stopped.how); }
using Leave = std::variant<Farewell, Stopped>;

struct Departure {
  // The node's end: "was stopped by SIGTERM", "failed: exit status 3".  Empty:
  // it has done its work.
  std::string failure;
  bool suspend = false;
};
// `errors_count`: a worker in which an operation failed has not done its work.
Departure DepartureOf(const Leave& leave, bool errors_count);

// ----- MEMBERS: to nodes a ReplicaView, or

// A server has made all changes of replicas up to this epoch.
struct Acknowledged {
  int epoch = 0;
};
inline auto Fields(Acknowledged& word) { return std::tie(word.epoch); }
// This worker, which came late, can take part.
struct Ready {};
inline auto Fields(Ready& /*word*/) { return std::tuple<>(); }
// This worker and all others that take part are between two steps, and this replica may join.
struct Admit {
  int replica = 0;
  int life = 0;  // of the replica
};
inline auto Fields(Admit& word) { return std::tie(word.replica, word.life); }
// Others wait for this worker, to which it is passed on.
struct Awaited {
  int rank = 0;
  int round = 0;
  std::string tensor;
};
inline auto Fields(Awaited& word) { return std::tie(word.rank, word.round, word.tensor); }
// The replica of this worker is late, and is to be removed.
struct Late {
  int rank = 0;
  int epoch = 0;  // that the server knows
  std::string why;
};
inline auto Fields(Late& word) { return std::tie(word.rank, word.epoch, word.why); }
// A server is lost, and another one is waited for.
struct ServerLost {
  int rank = 0;
  int turn = 0;  // of its place
  std::string reason;
};
inline auto Fields(ServerLost& word) { return std::tie(word.rank, word.turn, word.reason); }
// The node that comes with the message has the place of a server that was lost.
struct ServerReplaced {
  int rank = 0;
  int turn = 0;     // of its place
  int servers = 0;  // how many there are
};
inline auto Fields(ServerReplaced& word) { return std::tie(word.rank, word.turn, word.servers); }
// A server knows that a worker has left. Sent where a scheduler may return.
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
