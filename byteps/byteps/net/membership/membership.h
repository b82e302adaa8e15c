// Who is in the job: admission, liveness, departure.
//
// The scheduler is the one authority.  It admits a node or refuses it with a
// reason, tells every node once all have come, watches each of them (its
// connection, its heartbeats), and tells the others when one is lost or has left.
// The other nodes watch the scheduler alone.  So one process decides who is lost,
// and all survivors give the same reason.
//
//   node                              scheduler
//    | -- ADD_NODE (role, rank, counts) --> |  checks, gives an id
//    | <-- WELCOME (id) or REFUSED (why) -- |  to a probe always REFUSED: with what it would say
//    | <-- ADD_NODE (servers, to workers) - |  once all have registered; with the slowest worker's
//    |                                      |  link; to a server its neighbors, with backups
//    | -- HEARTBEAT --> <-- HEARTBEAT ----- |  as long as the job lives; a node's may carry a
//    |                                      |  report on itself (SetReporter)
//    | -- ADD_NODE (account) -------------> |  to the next scheduler, when one has died: what the
//    |                                      |  node knows of the job (words.h)
//    | <-- JOB_FAILED (why) --------------- |  a peer was lost
//    | -- JOB_FAILED (why) ---------------> |  a connection between two nodes broke
//    | -- LEAVE (finish | suspend) -------> |  a worker has done its work
//    | -- LEAVE (failed: why) ------------> |  a worker ends for another reason: the job fails
//    | -- LEAVE (stopped ...) ------------> |  a server was told to end: the job fails
//    | <-- NODE_LEFT (who) ---------------- |  to the worker itself at once; to servers, those
//    |                                      |  of some moments together
//    | <-- JOB_END (finish | suspend) ----- |  to servers, once no worker is left
//    | <-- MEMBERS (replicas) ------------- |  a replica was removed, or comes back; to all
//    | -- MEMBERS (epoch) ----------------> |  a server has made all changes up to that
//    | -- MEMBERS (ready | admit) --------> |  a replica can join; the others are between two steps
//    | -- MEMBERS (left-known) -----------> |  a server has heard NODE_LEFT, where a scheduler may
//    |                                      |  return: its worker is let go then
//    | <-- MEMBERS (server-lost) ---------- |  to workers: its requests wait; with backups to
//    | <-- MEMBERS (server-replaced) ------ |  servers, too: this node has its place
//
// Each command is taken from those alone who may send it (net/membership/membership.cc).
//
// Two classes take part, and neither knows the other: SchedulerMembership (scheduler_membership.h)
// and NodeMembership (node_membership.h).  Membership is what a van knows of both.  What both are
// made of: the nodes (roster.h), what messages say (words.h), the thread that sends heartbeats
// and the events for the process (event.h).
//
// All times are of the AwakeClock: who stood still itself gives the others time to be heard before
// it calls them lost, and says of itself that it stood still (base/process.h).
//
// After a suspended job the scheduler forgets the nodes and admits those of the
// next one; its worker count is then taken from the first worker that comes.
//
// Generations.  A scheduler that keeps the cluster (MembershipSettings::keep) does the same after
// a failure: it tells all nodes, closes their connections, forgets them, and admits those of the
// next generation of the job.  It numbers the generations; the number is part of the job's, which
// who connects and who listens prove to each other, so that a connection belongs to one
// generation.  Connections of an older one that still live are nobody's: what comes by them is
// not looked at.  Who comes while there is no room for it yet, since the old generation has not
// ended for the scheduler, is told to come again.
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

// The scheduler has no room for this node yet; NodeMembership::Join may be called anew, by another
// NodeMembership.
struct ComeAgain : public Error {
  using Error::Error;
};

// The job failed while its nodes gathered, after the scheduler had admitted this one.
struct JobFailed : public Error {
  using Error::Error;
};

// The scheduler did not say anything in time.
struct NoAnswer : public Error {
  using Error::Error;
};

// What a probe ends with where the scheduler would admit this node (MembershipSettings::probe).
struct WouldBeAdmitted : public Error {
  using Error::Error;
};

class Membership {
 public:
  // Called in the receiving thread or the heartbeats' thread, with no lock held; must
  // not block and must not stop the van.
  using Listener = Announcer::Listener;

  // The scheduler's side or a node's, as the settings say.  `links` outlives it.
  static std::unique_ptr<Membership> Make(MembershipLinks* links,
                                          const MembershipSettings& settings, Listener listener);
  virtual ~Membership() = default;

  // This side, to be asked what the other one does not have; null: it is the other one.
  virtual SchedulerMembership* AsScheduler() { return nullptr; }
  virtual NodeMembership* AsNode() { return nullptr; }

  // Once, after the links listen.  On the scheduler it returns at once, on a node when the job is
  // complete; see there.
  virtual void Join() = 0;

  // On a server or the scheduler that was told to end: fails the job for the reason that it "was
  // `how`", such as "stopped by SIGTERM", and returns when all were told, after a few
  // seconds at most.  Before a worker came the scheduler just forgets the server.
  virtual void StopByOrder(const std::string& how) = 0;

  // Whether this is a job that has begun, and workers are in it.  Such workers may save what they
  // have when they are told to end, and need the scheduler and all servers for it.
  virtual bool HasWorkers() = 0;

  // Ends the heartbeats' thread.  Nothing is sent or reported afterwards.
  virtual void Stop() = 0;

  // A control message came.  One that its sender must not send is ignored, with a warning for the
  // first one of each sender.  Receiving thread.
  virtual void Handle(const Message& msg) = 0;

  // The connection to `node_id` closed.  Receiving thread.
  virtual void OnDisconnect(int node_id) = 0;

  // A connection to `node_id` broke, and `how`, while the process at its other end may
  // well live.  What the scheduler has to say of that process goes first; if it is silent,
  // it is told, and the job fails.  `closed`: the other end closed it, which may have more
  // to say of the reason and goes first as well.  Receiving thread.
  virtual void OnLinkLost(int node_id, const std::string& how, bool closed) = 0;

  // "worker 1 (10.0.0.3:41234)"; without the address while it is not known.
  virtual std::string NameOf(int node_id) = 0;
};

namespace membership {

void Send(MembershipLinks* links, Control::Command command, int recver,
          const std::string& body = "", const std::vector<Node>& nodes = {});

// "scheduler (10.0.0.1:9000)"
std::string NameOfScheduler(const MembershipLinks& links);

// Which control commands of membership a node may send, and to whom.

// Whether a node of role `from` may send this command to one of role `to`.  `body`: the message's.
bool MaySend(Control::Command command, Node::Role from, Node::Role to, const std::string& body);

// "JOB_END"
std::string NameOf(Control::Command command);

}  // namespace membership
}  // namespace ps

#endif  // BYTEPS_NET_MEMBERSHIP_MEMBERSHIP_H_
