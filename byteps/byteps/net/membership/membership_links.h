#ifndef BYTEPS_NET_MEMBERSHIP_MEMBERSHIP_LINKS_H_
#define BYTEPS_NET_MEMBERSHIP_MEMBERSHIP_LINKS_H_

#include <cstdint>
#include <string>

#include "byteps/net/membership/event.h"
#include "ps/internal/message.h"

namespace ps {

// How membership reaches other processes.
//
// A van is behind it, or a test.
class MembershipLinks {
 public:
  virtual ~MembershipLinks() = default;
  virtual Node self() const = 0;
  virtual const Node& scheduler() const = 0;
  // The scheduler has given this node its id.
  virtual void SetSelf(const Node& node) = 0;
  // Makes a connection to `node`, or names the one that came from it.  Of the scheduler, with which
  // there is one, it learns the NICs.
  virtual void Connect(const Node& node) = 0;
  // Closes it when what was sent before has left.  A server closes it at once, and another process
  // may come under this id from then on.
  virtual void Disconnect(int node_id) = 0;
  // Never blocks.  What cannot be sent is dropped: OnLinkLost tells why.
  virtual void Send(Message* msg) = 0;
  // Why the last attempt to connect to the scheduler failed; empty where that is not known.
  virtual std::string DialError() { return ""; }
  // Whether links with this node are broken now, of which the membership may not have heard yet.
  virtual bool IsBroken(int /*node_id*/) { return false; }
  // The rate of the NICs that the nodes of this host use, Mbit/s; 0: not known.
  virtual int host_mbps() const { return 0; }
  // Connections that are made from now on belong to this generation of the job.
  virtual void SetIncarnation(int incarnation) = 0;
  // The number of the job (link/admission.h).  A scheduler that goes on with a job of another one
  // takes its number.
  virtual uint64_t job() const = 0;
  virtual void SetJob(uint64_t job) = 0;
};

}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_MEMBERSHIP_LINKS_H_
