#ifndef BYTEPS_NET_MEMBERSHIP_MEMBERSHIP_LINKS_H_
#define BYTEPS_NET_MEMBERSHIP_MEMBERSHIP_LINKS_H_

#include <cstdint>
#include <string>

#include "byteps/net/membership/event.h"
#include "ps/internal/message.h"

namespace ps {

// Connections of membership to other processes. Implemented by a van, or by a test.
class MembershipLinks {
 public:
  virtual ~MembershipLinks() = default;
  virtual Node self() const = 0;
  virtual const Node& scheduler() const = 0;
  // Sets this node's record, with the id that the scheduler gave it.
  virtual void SetSelf(const Node& node) = 0;
  // Connects to `node`, or gives an id to the process that has connected as `node`. If `node` is
  // the scheduler and is already connected, takes note of its NICs.
  virtual void Connect(const Node& node) = 0;
  // Closes the connection when all queued messages are sent. On a server, closes it at once, and
  // another process may then take this id.
  virtual void Disconnect(int node_id) = 0;
  // Sends a message. Never blocks. Drops a message that cannot be sent; Membership::OnLinkLost gets
  // the reason.
  virtual void Send(Message* msg) = 0;
  // Returns why the last attempt to connect to the scheduler failed; "" if unknown.
  virtual std::string DialError() { return ""; }
  // Returns whether links to this node are broken right now, perhaps before the membership knows.
  virtual bool IsBroken(int /*node_id*/) { return false; }
  // Rate of the NICs that the nodes of this host use, in Mbit/s; 0: unknown.
  virtual int host_mbps() const { return 0; }
  // Sets the job's generation for connections made from now on.
  virtual void SetGeneration(int generation) = 0;
  // The job's number (link/admission.h). A scheduler that takes over another scheduler's job adopts
  // its number.
  virtual uint64_t job() const = 0;
  virtual void SetJob(uint64_t job) = 0;
};

}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_MEMBERSHIP_LINKS_H_
