#include "byteps/net/link/admission.h"

#include "byteps/base/invariant.h"
#include "ps/internal/postoffice.h"

namespace ps {

std::string ReasonToRefuse(const Applicant& applicant, Node::Role role, uint64_t token,
                           uint64_t job, bool is_expected) {
  if (job == 0) return "this node is in no job yet";
  const bool scheduler = role == Node::SCHEDULER;
  const bool joins = scheduler && applicant.job == 0 && !applicant.resumes;
  if (applicant.job != job && !joins && !(scheduler && applicant.returns))
    return NotOurs(applicant.job, job);
  if (applicant.receiver != 0 && applicant.receiver != token) {
    return "the process that is meant is not here any more";
  }
  const PeerIdentity& who = applicant.who;
  if (who.token == 0 || applicant.index < 0 || applicant.index >= kMaxLinks || who.role < 0 ||
      who.role > Node::SCHEDULER) {
    return "its hello does not parse";
  }
  const bool between_servers = role == Node::SERVER && who.role == Node::SERVER;
  if (between_servers ? !is_expected : !ConnectsTo(static_cast<Node::Role>(who.role), role)) {
    return "its role must not connect to this node: workers connect to servers and the scheduler, "
           "servers to the scheduler, and to a server only where the scheduler has said so to both "
           "(BYTEPS_BACKUP_STATE)";
  }
  if (scheduler) return applicant.plane == 0 ? "" : "the scheduler has no data plane";
  if (between_servers ? !IsServerId(applicant.node_id) : !IsWorkerId(applicant.node_id)) {
    return between_servers ? "it is no server" : "it is no worker";
  }
  if (Postoffice::IDtoRank(applicant.node_id) != who.rank) {
    return "its rank is not that of its node id";
  }
  return "";
}

void CheckControl(const Control& control, int peer, const PeerIdentity& who, bool is_scheduler) {
  if (peer == Node::kEmpty && control.cmd != Control::ADD_NODE) {
    throw Error("it is no member of the job and sent more than that it wants to join");
  }
  if (control.cmd != Control::ADD_NODE || !is_scheduler) return;
  if (control.node.size() != 1 || TokenOf(control.node[0]) != who.token ||
      control.node[0].role != who.role || control.node[0].aux_id != who.rank) {
    throw Error("it wants to join as another process, or in another role or rank");
  }
}

void CheckMember(int peer) {
  if (peer == Node::kEmpty) throw Error("it is no member of the job");
}

std::string JobNumber::Hear(uint64_t theirs, bool from_scheduler) {
  if (theirs == 0) return "it is in no job";
  if (from_scheduler && job_ == 0) job_ = theirs;
  return theirs == job_ ? "" : NotOurs(theirs, job_);
}

}  // namespace ps
