// Who may connect to this node, by which name, and what both ends of a link make of what they are
// told first.
#ifndef BYTEPS_NET_LINK_ADMISSION_H_
#define BYTEPS_NET_LINK_ADMISSION_H_

#include <sys/random.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "byteps/base/invariant.h"
#include "ps/internal/message.h"

namespace ps {

// The meta of a message as it lies on the wire, by whatever transport.
//
// What identifies sender and receiver is not in it: a connection knows its ends.

// Longer ones are refused when they come.  The names of some hundred thousand nodes fit.
constexpr size_t kMaxMetaBytes = 64 << 20;

std::string EncodeMeta(const Meta& meta);

// False when the bytes are no meta of this version: too few or too many, or a value that
// means nothing here.  `meta` is undefined then.
bool DecodeMeta(const char* data, size_t size, Meta* meta);

// Random numbers that name a process, among all that have ever been in its place, and a job.  That
// of a process is carried in Node::endpoint_name.
inline uint64_t NewToken() {
  // From the kernel: the C++ library's source of random numbers needs a newer C library than
  // the rest of us.
  uint64_t token = 0;
  while (token == 0) {
    if (getrandom(&token, sizeof(token), 0) != sizeof(token)) ThrowErrno("getrandom");
  }
  return token;
}

// 0 if it has none.  Byte by byte, so that it means the same on every CPU.
inline uint64_t TokenOf(const Node& node) {
  uint64_t token = 0;
  if (node.endpoint_name_len != sizeof(token)) return 0;
  for (size_t i = 0; i < sizeof(token); ++i) {
    token |= static_cast<uint64_t>(static_cast<unsigned char>(node.endpoint_name[i])) << (8 * i);
  }
  return token;
}

inline void SetToken(uint64_t token, Node* node) {
  memset(node->endpoint_name, 0, sizeof(node->endpoint_name));
  for (size_t i = 0; i < sizeof(token); ++i) {
    node->endpoint_name[i] = static_cast<char>(token >> (8 * i) & 0xff);
  }
  node->endpoint_name_len = sizeof(token);
}

// The number of a job: a random one, and in its low bits the generation that the scheduler is at.
// Who connects and who listens say it to each other and prove it, so that a connection belongs to
// one generation of one job.
constexpr uint64_t kIncarnationMask = 0xffff;

inline uint64_t NewJob() {
  uint64_t job = 0;
  while (job == 0) job = NewToken() & ~kIncarnationMask;
  return job;
}

inline uint64_t WithIncarnation(uint64_t job, int incarnation) {
  return (job & ~kIncarnationMask) | (static_cast<uint64_t>(incarnation) & kIncarnationMask);
}

// Jobs count from 1.  A server says this to another one that connects before the scheduler has
// named it: try again.
constexpr int kNotTold = 0;

// Why who says `theirs` has nothing to say to who is of `ours`.
inline std::string NotOurs(uint64_t theirs, uint64_t ours) {
  if (((theirs ^ ours) & ~kIncarnationMask) != 0) return "it belongs to another job";
  return "it is of generation " + std::to_string(theirs & kIncarnationMask) +
         " of the job, and this node of generation " + std::to_string(ours & kIncarnationMask);
}

// Whether the node that says `theirs` is of an earlier generation of the same job than `ours`: the
// scheduler's word on the new one is still in flight to it.
inline bool IsBehind(uint64_t theirs, uint64_t ours) {
  const bool same_job = ((theirs ^ ours) & ~kIncarnationMask) == 0;
  return same_job && (theirs & kIncarnationMask) < (ours & kIncarnationMask);
}

// Who connects to whom: everybody to the scheduler, and a worker to each server.  With
// BYTEPS_BACKUP_STATE the servers are a ring by rank, in which each keeps a copy of its state at
// the next one, and neighbors have a link.  Who was connected to answers along the same
// connections.
inline bool ConnectsTo(Node::Role from, Node::Role to) {
  if (from == to) return false;
  return to == Node::SCHEDULER || (from == Node::WORKER && to == Node::SERVER);
}

// Whether the servers of these two ranks have a link, in a ring of so many.
inline bool AreNeighbors(int one, int other, int servers) {
  if (one == other || servers < 2) return false;
  return (one + 1) % servers == other || (other + 1) % servers == one;
}

// Which of two neighbors makes it: with two servers there would be two links else.
inline bool DialsNeighbor(int self, int other) { return self < other; }

// Whether anybody connects to a node of this role, which listens then.
inline bool Listens(Node::Role role) { return role != Node::WORKER; }

// Whether a node may call itself a worker of the job by this id.
inline bool IsWorkerId(int node_id) {
  return node_id != Node::kEmpty && node_id > 8 && node_id % 2 == 1;
}

// Or a server.
inline bool IsServerId(int node_id) { return node_id >= 8 && node_id % 2 == 0; }

// What a greeting that failed means, over any transport.
//
// A refusal with a proof is what this very process decided: it is final, unless it says that what
// stands in the way will pass.  Everything else (no proof, or a wrong one, bytes that do not parse,
// an alert of TLS, another version) may as well come from bytes that were damaged on the way.  On a
// link that was there before it is one failed attempt, and the next one is made until
// BYTEPS_RECONNECT_TIMEOUT_S is over; on a first connection it is final, since there it almost
// always means different settings.

enum class GreetingFailure {
  kMaybeDamaged,  // nothing proves that the other end has said so
  kDecided,       // the other end has, and it was the one that was meant
  kWillPass,      // it is not ready yet, such as one of an earlier generation of the job
};

// Whether another attempt is made.  `link_was_there`: the greeting is that of a link that broke.
inline bool IsOneMoreAttempt(GreetingFailure failure, bool link_was_there) {
  if (failure == GreetingFailure::kWillPass) return true;
  return link_was_there && failure == GreetingFailure::kMaybeDamaged;
}

// Who may connect to this node, and for whom a peer speaks.

// What a process that connected to this one has proved of itself.
struct PeerIdentity {
  uint64_t token = 0;
  int role = -1;  // a Node::Role
  // That a worker has or wants, or that a server has, to another server; -1: whatever the scheduler
  // says.
  int rank = -1;
};

// What a peer says that asks for a link.  It has proved it.
struct Applicant {
  PeerIdentity who;
  uint64_t job = 0;            // 0: not known yet, to the scheduler alone
  uint64_t receiver = 0;       // the token of the process that is meant; 0: not known, or not said
  int node_id = Node::kEmpty;  // that it has
  int plane = 0;               // of the links of the pair
  int index = 0;               // among those of the plane
  bool resumes = false;        // the link was there before, and broke
  bool returns = false;        // it looks for the scheduler of its job, whichever process that is
};

// More links of a plane nobody asks for.
constexpr int kMaxLinks = 64;

// Empty: it may connect to a node of this role, token and job (0: in none yet).  Whether a
// scheduler goes on with the job of one that returns, membership says.  `is_expected`: the
// scheduler has told this server that the very process connects to it, as the server that it says
// it is (PeerTable::Expects).
std::string ReasonToRefuse(const Applicant& applicant, Node::Role role, uint64_t token,
                           uint64_t job, bool is_expected = false);

// Throws Error where a peer may not send a message of membership: one without a node id may
// ask to join and no more, and nobody may ask for another process.
void CheckControl(const Control& control, int peer, const PeerIdentity& who, bool is_scheduler);
// Likewise with any other message.
void CheckMember(int peer);

// The number of the job that this node is in; 0 while it is not known.  Any thread.
class JobNumber {
 public:
  uint64_t get() const { return job_; }
  void Set(uint64_t job) { job_ = job; }
  // Links that are made from now on belong to this generation.
  void SetIncarnation(int incarnation) { job_ = WithIncarnation(job_, incarnation); }

  // Whom this node connects to has proved to be of this job.  What the scheduler says first, this
  // node believes.  Returns a reason to give the link up; empty: none.
  std::string Hear(uint64_t theirs, bool from_scheduler);

 private:
  std::atomic<uint64_t> job_{0};
};

// What has such a number.
class OfAJob {
 public:
  virtual ~OfAJob() = default;
  virtual JobNumber* job_number() = 0;
  // Why the last attempt to connect to this node failed; empty where that is not known.
  virtual std::string DialError(int /*node_id*/) { return ""; }
  // Whether links with this node are broken now, of which the membership may not have heard yet.
  virtual bool IsBroken(int /*node_id*/) { return false; }
};

}  // namespace ps

#endif  // BYTEPS_NET_LINK_ADMISSION_H_
