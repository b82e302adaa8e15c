// Admission of links: who may connect to this node and under which identity, and what both ends
// conclude from the greeting.
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

// Encodes a message's meta for the wire, the same for every transport.
//
// Sender and receiver are not encoded, because a connection knows its two ends.

// Limit of the bytes of an encoded meta. A receiver refuses a larger one. A list of several hundred
// thousand nodes fits.
constexpr size_t kMaxMetaBytes = 64 << 20;

std::string EncodeMeta(const Meta& meta);

// Returns false if the bytes are not a meta of this version: too few, too many, or an invalid
// value. `meta` is then undefined.
bool DecodeMeta(const char* data, size_t size, Meta* meta);

// Returns a random number that identifies a job, or a process among all that ever had its rank. A
// process's token travels in Node::endpoint_name.
inline uint64_t NewToken() {
  // Calls the kernel directly: std::random_device would require a newer C++ library at run time.
  uint64_t token = 0;
  while (token == 0) {
    if (getrandom(&token, sizeof(token), 0) != sizeof(token)) ThrowErrno("getrandom");
  }
  return token;
}

// Returns the node's token, or 0 if it has none. The token is read byte by byte, so it is the same
// on CPUs of either byte order.
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

// Bits of a job's number that are the scheduler's current generation. The other bits are random.
// Both ends of a new connection exchange and prove the number, so a connection belongs to one
// generation of one job.
constexpr uint64_t kGenerationMask = 0xffff;

inline uint64_t NewJob() {
  uint64_t job = 0;
  while (job == 0) job = NewToken() & ~kGenerationMask;
  return job;
}

inline uint64_t WithGeneration(uint64_t job, int generation) {
  return (job & ~kGenerationMask) | (static_cast<uint64_t>(generation) & kGenerationMask);
}

// Generation of a node that does not know the generation yet; real generations start at 1. If a
// server connects to another one before the scheduler has announced it there, the other one answers
// with this number, and the first one tries again.
constexpr int kNotTold = 0;

// Returns why a node with job number `theirs` may not connect to one with `ours`.
inline std::string NotOurs(uint64_t theirs, uint64_t ours) {
  if (((theirs ^ ours) & ~kGenerationMask) != 0) return "it belongs to another job";
  return "it is of generation " + std::to_string(theirs & kGenerationMask) +
         " of the job, and this node of generation " + std::to_string(ours & kGenerationMask);
}

// Returns whether `theirs` is an earlier generation of the same job. The scheduler's message about
// the new generation is then still in flight to the node with `theirs`.
inline bool IsBehind(uint64_t theirs, uint64_t ours) {
  const bool same_job = ((theirs ^ ours) & ~kGenerationMask) == 0;
  return same_job && (theirs & kGenerationMask) < (ours & kGenerationMask);
}

// Returns whether nodes of role `from` connect to nodes of role `to`: all nodes to the scheduler,
// and workers to servers. Answers use the same connections. (With BYTEPS_BACKUP_STATE neighboring
// servers have a link, too: see AreNeighbors.)
inline bool ConnectsTo(Node::Role from, Node::Role to) {
  if (from == to) return false;
  return to == Node::SCHEDULER || (from == Node::WORKER && to == Node::SERVER);
}

// Returns whether the servers of these ranks have a link. With BYTEPS_BACKUP_STATE the servers form
// a ring by rank, in which the next server keeps a copy of a server's state.
inline bool AreNeighbors(int one, int other, int servers) {
  if (one == other || servers < 2) return false;
  return (one + 1) % servers == other || (other + 1) % servers == one;
}

// Returns whether `self` dials its neighbor `other`. Only the lower rank dials. Otherwise a ring of
// two servers would have two links.
inline bool DialsNeighbor(int self, int other) { return self < other; }

// Returns whether nodes of this role accept connections.
inline bool Listens(Node::Role role) { return role != Node::WORKER; }

// Returns whether `node_id` is an id of a worker in the job.
inline bool IsWorkerId(int node_id) {
  return node_id != Node::kEmpty && node_id > 8 && node_id % 2 == 1;
}

// Returns whether `node_id` is an id of a server in the job.
inline bool IsServerId(int node_id) { return node_id >= 8 && node_id % 2 == 0; }

// Meaning of a failed greeting, for all transports.
//
// An authenticated refusal is a decision of the peer. It is final, unless the peer says that it is
// not ready yet. Everything else (no proof or a wrong one, bytes that do not parse, a TLS alert,
// another version) may be corruption on the wire. A link that existed before then counts one failed
// attempt, and retries until BYTEPS_RECONNECT_TIMEOUT_S ends. A first connection fails at once,
// because its cause is almost always different settings.

enum class GreetingFailure {
  kMaybeDamaged,  // nothing proves that the peer sent these bytes
  kDecided,       // the intended peer refused, with a valid proof
  kWillPass,      // the peer is not ready, e.g. it is still in an earlier generation of the job
};

// Returns whether to try again after a failed greeting. `link_was_there`: whether the greeting was
// to resume a broken link.
inline bool IsOneMoreAttempt(GreetingFailure failure, bool link_was_there) {
  if (failure == GreetingFailure::kWillPass) return true;
  return link_was_there && failure == GreetingFailure::kMaybeDamaged;
}

// Identity that a connected process has proved.
struct PeerIdentity {
  uint64_t token = 0;
  int role = -1;  // a Node::Role
  // Rank that a worker has or wants, or that a server claims to another server. -1: the scheduler
  // decides.
  int rank = -1;
};

// Authenticated request for a link.
struct Applicant {
  PeerIdentity who;
  uint64_t job = 0;            // number of the job; 0: unknown, which only the scheduler accepts
  uint64_t receiver = 0;       // token of the process that it wants to reach; 0: unknown
  int node_id = Node::kEmpty;  // the applicant's node id, if it has one
  int plane = 0;               // plane of the link
  int index = 0;               // index of the link within its plane
  bool resumes = false;        // the link existed before, and broke
  bool returns = false;        // the applicant looks for its job's scheduler, perhaps a new one
};

// Limit of links per plane and pair of nodes.
constexpr int kMaxLinks = 64;

// Returns why the applicant may not connect to a node of this role, token and job (0: the node is
// in no job yet). Returns "" if it may. This function does not decide whether a scheduler takes
// over a returning node's job; the membership does. `is_expected`: whether the scheduler has
// announced the applicant's process as the server that it claims to be (PeerTable::Expects).
std::string ReasonToRefuse(const Applicant& applicant, Node::Role role, uint64_t token,
                           uint64_t job, bool is_expected = false);

// Throws Error if the peer may not send this membership message. A peer without a node id may only
// ask to join, and no peer may ask on behalf of another process.
void CheckControl(const Control& control, int peer, const PeerIdentity& who, bool is_scheduler);
// Throws Error if the peer has no node id yet. Such a peer may send membership messages only.
void CheckMember(int peer);

// Number of the job that this node is in; 0 while unknown. Thread-safe.
class JobNumber {
 public:
  uint64_t get() const { return job_; }
  void Set(uint64_t job) { job_ = job; }
  // Sets the generation for links made from now on.
  void SetGeneration(int generation) { job_ = WithGeneration(job_, generation); }

  // Checks the job number of an authenticated peer against this node's. A node without a number
  // adopts the scheduler's. Returns why the link must be closed, or "".
  std::string Hear(uint64_t theirs, bool from_scheduler);

 private:
  std::atomic<uint64_t> job_{0};
};

// Interface of vans that belong to a numbered job.
class OfAJob {
 public:
  virtual ~OfAJob() = default;
  virtual JobNumber* job_number() = 0;
  // Returns why the last attempt to connect to this node failed; "" if unknown.
  virtual std::string DialError(int /*node_id*/) { return ""; }
  // Returns whether links to this node are broken right now. The membership may not know it yet.
  virtual bool IsBroken(int /*node_id*/) { return false; }
};

}  // namespace ps

#endif  // BYTEPS_NET_LINK_ADMISSION_H_
