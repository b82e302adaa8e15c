// Membership of the job: admission, liveness, departure.
//
// The scheduler alone decides. It admits or refuses nodes, tells all nodes when the job is
// complete, watches the connections and heartbeats of all nodes, and tells the remaining nodes when
// a node is lost or has left. Workers and servers watch only the scheduler. So all survivors report
// the same reason for a loss.
//
//   node                              scheduler
//    | -- ADD_NODE (role, rank, counts) --> |  checks, assigns an id
//    | <-- WELCOME (id) or REFUSED (why) -- |  a probe always gets REFUSED, with the answer
//    | <-- ADD_NODE (servers, to workers) - |  once all have registered; with the slowest worker's
//    |                                      |  link rate; with backups to servers: their neighbors
//    | -- HEARTBEAT --> <-- HEARTBEAT ----- |  until the job ends; a node's heartbeat may carry
//    |                                      |  a report on the node (SetReporter)
//    | -- ADD_NODE (account) -------------> |  to the scheduler that replaces a dead one: what
//    |                                      |  the node knows of the job (words.h)
//    | <-- JOB_FAILED (why) --------------- |  a peer was lost
//    | -- JOB_FAILED (why) ---------------> |  a connection between two nodes broke
//    | -- LEAVE (finish | suspend) -------> |  a worker's work is done
//    | -- LEAVE (failed: why) ------------> |  a worker failed: the job fails
//    | -- LEAVE (stopped ...) ------------> |  a server was told to stop: the job fails
//    | <-- NODE_LEFT (who) ---------------- |  to the worker itself at once; to servers
//    |                                      |  batched over some milliseconds
//    | <-- JOB_END (finish | suspend) ----- |  to servers, when no worker is left
//    | <-- MEMBERS (replicas) ------------- |  to all: a replica was removed, or comes back
//    | -- MEMBERS (epoch) ----------------> |  a server has applied all changes up to this epoch
//    | -- MEMBERS (ready | admit) --------> |  a replica can join; the others are between steps
//    | -- MEMBERS (left-known) -----------> |  a server knows a NODE_LEFT, if a scheduler may
//    |                                      |  return; the worker is dismissed then
//    | <-- MEMBERS (server-lost) ---------- |  to workers, and with backups to servers:
//    | <-- MEMBERS (server-replaced) ------ |  requests wait; this node replaces it
//
// Each command is accepted only from nodes that may send it (net/membership/membership.cc).
//
// SchedulerMembership (scheduler_membership.h) and NodeMembership (node_membership.h) implement the
// two sides, independently of each other. A van uses their common interface, Membership. Both sides
// use the roster of nodes (roster.h), the messages (words.h), the heartbeat thread, and the
// process's events (event.h).
//
// All times are measured by AwakeClock. A process that was suspended gives its peers time to be
// heard before it calls them lost, and reports its own pause (base/stall_watch.h).
//
// After a suspended job the scheduler forgets the nodes and admits those of the next job. The first
// worker that comes then sets the number of workers.
//
// Generations: a scheduler that keeps the cluster (MembershipSettings::keep) also starts over after
// a failure. It tells all nodes, closes their connections, forgets them, and admits the nodes of
// the job's next generation. The generation is part of the job's number, which both ends of a new
// connection prove, so a connection belongs to one generation. Messages over older connections are
// dropped. If a node comes before the scheduler has ended the old generation, the scheduler tells
// it to come again.
#ifndef BYTEPS_NET_MEMBERSHIP_MEMBERSHIP_H_
#define BYTEPS_NET_MEMBERSHIP_MEMBERSHIP_H_

#include <memory>
#include <string>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/net/membership/announcer.h"
#include "byteps/net/membership/event.h"
#include "byteps/net/membership/membership_links.h"
#include "byteps/net/membership/membership_settings.h"
#include "byteps/net/membership/words.h"
#include "ps/internal/message.h"

namespace ps {

class NodeMembership;
class SchedulerMembership;

// Thrown if the scheduler has no rank for this node yet. The caller may make a new NodeMembership
// and call Join again.
struct ComeAgain : public Error {
  using Error::Error;
};

// Thrown if the job failed before all its nodes had joined, after the scheduler had admitted this
// node.
struct JobFailed : public Error {
  using Error::Error;
};

// Thrown if the scheduler did not answer in time.
struct NoAnswer : public Error {
  using Error::Error;
};

// Thrown by Join if this node only asks whether the scheduler would admit it
// (MembershipSettings::probe), and the scheduler would.
struct WouldBeAdmitted : public Error {
  using Error::Error;
};

class Membership {
 public:
  // Called by the receiving thread or the heartbeat thread, without a lock. It must not block or
  // stop the van.
  using Listener = Announcer::Listener;

  // Makes the scheduler's side or a node's side, as the settings say. `links` must outlive the
  // result.
  static std::unique_ptr<Membership> Make(MembershipLinks* links,
                                          const MembershipSettings& settings, Listener listener);
  virtual ~Membership() = default;

  // Return this object as its concrete class; null if it is of the other class.
  virtual SchedulerMembership* AsScheduler() { return nullptr; }
  virtual NodeMembership* AsNode() { return nullptr; }

  // Joins the job. Call once, when the links listen. Returns at once on the scheduler. On a node,
  // returns when the job is complete (NodeMembership::Join).
  virtual void Join() = 0;

  // Fails the job, because this server or scheduler "was `how`", for example "stopped by SIGTERM".
  // Returns within a few seconds, when all nodes have been told. If no worker has come yet, there
  // is no job to fail, and the scheduler only forgets this server.
  virtual void StopByOrder(const std::string& how) = 0;

  // Returns whether the job has begun and has workers. While it has, the scheduler and servers
  // should not stop: workers that are told to stop may first save their state, which needs all of
  // them.
  virtual bool HasWorkers() = 0;

  // Ends the heartbeat thread. Nothing is sent or reported afterwards.
  virtual void Stop() = 0;

  // Handles a control message. Ignores a message that its sender must not send, with a warning at
  // the first such message of each sender. Called by the receiving thread.
  virtual void Handle(const Message& msg) = 0;

  // Handles the end of the connection to `node_id`. Called by the receiving thread.
  virtual void OnDisconnect(int node_id) = 0;

  // Handles a connection to `node_id` that broke for the reason `how`. The process at its other end
  // may be alive. So this node first waits a moment for the scheduler's news of that process. If
  // there is none, this node reports the loss, and the job fails. `closed`: whether the peer closed
  // the connection; then this node also waits for the peer's own reason. Called by the receiving
  // thread.
  virtual void OnLinkLost(int node_id, const std::string& how, bool closed) = 0;

  // Returns text such as "worker 1 (10.0.0.3:41234)", without the address while it is unknown.
  virtual std::string NameOf(int node_id) = 0;
};

namespace membership {

void Send(MembershipLinks* links, Control::Command command, int recver,
          const std::string& body = "", const std::vector<Node>& nodes = {});

// Returns text such as "scheduler (10.0.0.1:9000)".
std::string NameOfScheduler(const MembershipLinks& links);

// Returns whether a node of role `from` may send this command to a node of role `to`. `body`: body
// of the message.
bool MaySend(Control::Command command, Node::Role from, Node::Role to, const std::string& body);

// Returns text such as "JOB_END".
std::string NameOf(Control::Command command);

}  // namespace membership
}  // namespace ps

#endif  // BYTEPS_NET_MEMBERSHIP_MEMBERSHIP_H_
