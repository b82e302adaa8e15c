// What a scheduler and its nodes say to each other, apart from the commands (commands.h).
#ifndef BYTEPS_NET_MEMBERSHIP_PROTOCOL_H_
#define BYTEPS_NET_MEMBERSHIP_PROTOCOL_H_

#include <map>
#include <string>
#include <vector>

#include "byteps/net/membership/event.h"
#include "byteps/net/membership/links.h"
#include "ps/internal/message.h"

namespace ps {
namespace membership {

constexpr int kProtocol = 15;
// How a REFUSED begins whose receiver may come again.
constexpr char kAgain[] = "again: ";
// And one whose receiver asked, and would be admitted.
constexpr char kWould[] = "would: ";

// What a node says of the job when it registers, in ADD_NODE.
struct Claim {
  int protocol = 0;
  int workers = -1;  // -1: whatever the job has
  int servers = -1;
  int link_mbps = 0;  // of a worker's network card; 0: not known
  int probe = 0;      // it asks for so many nodes, and does not join
  int replicas = 0;   // of a worker: jobs that train its model; 0: it does not say
  int backups = 0;    // 1: servers have links with each other
};
std::string PackClaim(const Claim& claim);
// Whether all of it could be read.  The protocol may be known even if not.
bool ParseClaim(const std::string& text, Claim* claim);

// How often the place of a server was lost or given to another, by its rank; 0 is not said.  Who
// has heard of an odd number knows that it is lost.
using Turns = std::map<int, int>;
std::string PackTurns(const Turns& turns);
bool ParseTurns(const std::string& text, Turns* turns);
int TurnOf(const Turns& turns, int rank);
bool IsVacant(const Turns& turns, int rank);

// What the scheduler says in ADD_NODE.
struct Beginning {
  int link_mbps = 0;  // the rate of the slowest worker's link
  bool late = false;  // this worker's replica comes to a job that has begun
  Turns turns;        // those that this node needs not hear of
};
std::string PackBeginning(const Beginning& beginning);
// Of anything else: nothing.
Beginning ParseBeginning(const std::string& text);

// What the scheduler says in WELCOME: the incarnation of the job, and its own life.
std::string PackWelcome(int incarnation, int life);
int LifeIn(const std::string& text);

// MEMBERS, to nodes.
std::string PackReplicas(const ReplicaView& view);
// False: it is no such thing.
bool ParseReplicas(const std::string& text, ReplicaView* view);
// MEMBERS, to the scheduler.  Of a server: it has made all changes up to an epoch; others wait for
// a worker, which is passed on to that worker; its replica is late, and is to be removed.  Of a
// worker that came late: it can take part.  Of a worker that takes part: it and all others are
// between two steps, and a replica that waits may join.  To workers, and to servers with backups: a
// server is lost, and another one is waited for; the node that comes with the message has taken its
// place.  Of a server, where a scheduler may return: it knows that a worker has left.
struct MemberWord {
  enum Kind {
    kAcknowledged,
    kReady,
    kAdmit,
    kAwaited,
    kLate,
    kServerLost,
    kServerReplaced,
    kLeftKnown
  } kind = kReady;
  int number = 0;  // kAdmit: the replica; kAwaited, kLate, kLeftKnown: the worker's rank; of
                   // others: the server's
  // kAcknowledged: up to which; kAdmit: the replica's life; kAwaited: the round; kLate: the epoch
  // that the server knows; kServerReplaced: how many servers there are.
  int epoch = 0;
  std::string text{};  // kAwaited: the tensor's name; kLate: why
  int turn = 0;        // kServerLost, kServerReplaced: of the server's place
};
std::string PackWord(const MemberWord& word);
bool ParseWord(const std::string& text, MemberWord* word);
// A kServerLost, of this node id.
std::string LostWord(int server, int turn, const std::string& reason);

// What a worker says in LEAVE.  A server that is told to end says how: "stopped by
// SIGTERM".
std::string PackFarewell(const Farewell& farewell);
struct Departure {
  // What happened to the node: "was stopped by SIGTERM", "failed: exit status 3".  Empty:
  // it has done its work.
  std::string failure;
  bool suspend = false;
};
// `errors_count`: a worker in which an operation failed has not done its work.
Departure ParseFarewell(const std::string& text, bool errors_count);

// How a JOB_END says that the workers come back.
std::string PackEnd(bool suspended);
bool ParseEnd(const std::string& text);

void Send(MembershipLinks* links, Control::Command command, int recver,
          const std::string& body = "", const std::vector<Node>& nodes = {});

bool BeginsWith(const std::string& text, const std::string& prefix);

// "scheduler (10.0.0.1:9000)"
std::string NameOfScheduler(const MembershipLinks& links);

}  // namespace membership
}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_PROTOCOL_H_
