// Who may connect to this node, and for whom a peer speaks.
#ifndef BYTEPS_NET_LINK_ADMISSION_H_
#define BYTEPS_NET_LINK_ADMISSION_H_

#include <atomic>
#include <cstdint>
#include <string>

#include "byteps/net/link/node_token.h"
#include "ps/internal/message.h"

namespace ps {

// What a process that connected to this one has proved of itself.
struct PeerIdentity {
  uint64_t token = 0;  // node_token.h
  int role = -1;       // a Node::Role
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

// The number of the job that this node is in (node_token.h); 0 while it is not known.  Any thread.
class JobNumber {
 public:
  uint64_t get() const { return job_; }
  void Set(uint64_t job) { job_ = job; }
  // Links that are made from now on belong to this incarnation.
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
};

}  // namespace ps
#endif  // BYTEPS_NET_LINK_ADMISSION_H_
