// Where a connection dials, over TCP or RDMA, and when next; and how long a link may be down.
#ifndef BYTEPS_NET_LINK_DIAL_PLAN_H_
#define BYTEPS_NET_LINK_DIAL_PLAN_H_

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "byteps/base/process.h"
#include "byteps/net/link/name_service.h"
#include "byteps/net/link/net_address.h"
#include "ps/internal/message.h"

namespace ps {

// A link between two processes, over TCP or RDMA, that broke while both may live: how long
// it may stay broken, and what is said of it.
enum class LinkFault {
  kClosed,  // the other end closed it, or the kernel did so for a process that ended
  kBroken,  // something broke: either end may be gone
  kSilent,  // nothing was acknowledged for a while
};

// What a link that the other end closed says of itself.
constexpr char kLinkClosed[] = "its connection closed";

// A process whose port is closed for so long has ended.
constexpr auto kListenerGoneTime = std::chrono::milliseconds(250);

// For how long the link with the node `peer` may be broken.  Zero: it is lost at once.
// `reconnect_s`: BYTEPS_RECONNECT_TIMEOUT_S.
std::chrono::steady_clock::duration LinkPatience(int peer, bool is_scheduler, double reconnect_s,
                                                 LinkFault fault);

struct LinkOutage {
  using Clock = AwakeClock;

  std::string reason;
  LinkFault fault = LinkFault::kBroken;
  Clock::time_point begin;
  Clock::time_point deadline;
  bool briefly = false;        // it has less time than BYTEPS_RECONNECT_TIMEOUT_S
  bool listener_gone = false;  // nobody listens any more where it was connected to
  // Bytes that were sent since it was made again, of which the other end acknowledged none.
  uint64_t unacknowledged = 0;

  static LinkOutage Of(const std::string& reason, LinkFault fault, Clock::duration patience,
                       double reconnect_s);
  // Why the link is lost.  `last_error`: of the last attempt to connect; may be empty.
  std::string GivenUp(double reconnect_s, const std::string& last_error) const;
  // The same where the other end had given it up before, and said `refusal`.
  std::string Refused(const std::string& refusal) const;

 private:
  std::string Unacknowledged() const;
  std::string LargePacketsVanish() const;  // empty where nothing speaks for it
};

// The line of the log when it is there again.  `which`: "the connection", "data connection 0".
void LogResumed(const std::string& which, int peer, const std::string& address,
                LinkOutage::Clock::duration after, size_t again);

// The line of the log when a link with several pairs of NICs is made again, and not over its first
// one, `home`, which failed for the reason `why` (may be empty): over `path`.
void LogAway(int peer, const std::string& home, const std::string& why, const std::string& path);
// And when it goes back.
void LogHome(int peer, const std::string& home);

// The outage of a link, over as many connections as it takes: by when it must be over, and what is
// said of it.
//
// A connection that was made again does not end the outage where its transport can only tell later
// whether it works: it ends when something that was sent over it has been acknowledged.  A path may
// carry a greeting and nothing larger.

// Locked by its owner, or of one thread.
class OutageWatch {
 public:
  using Clock = LinkOutage::Clock;

  // `reconnect_s`: BYTEPS_RECONNECT_TIMEOUT_S.
  explicit OutageWatch(double reconnect_s) : reconnect_s_(reconnect_s) {}

  // The connection broke, and the link may be without one for `patience`, of which `counted` has
  // passed already in silence.  `by_peer`: the peer closed it.  Where the last outage is not over,
  // this goes on, until the earlier of both deadlines.  Returns whether the deadline is another
  // one.
  bool Begin(const std::string& reason, LinkFault fault, bool by_peer, Clock::duration patience,
             Clock::duration counted);

  // There is a connection again, over which so many messages are sent again.  That the peer lives
  // was in doubt, and it does: the outage may take as long as any.
  void AwaitProof(size_t again);
  // The peer has got something over the last connection, of which this end did not hear.
  void HearProofOfTheLast();
  // The time is over.  Until when a connection has its chance that is there since a moment; at or
  // before now: it has had it.
  Clock::time_point ChanceUntil() const;
  void PostponeTo(Clock::time_point deadline) { outage_.deadline = deadline; }
  // So many bytes were sent over it, and not acknowledged.
  void NoteUnacknowledged(uint64_t bytes);

  // It is over; the link was without a connection for so long.
  Clock::duration End();

  // Why the link is lost.  `last_error`: of the last attempt to connect; may be empty.
  std::string GivenUp(bool listener_gone, const std::string& last_error) const;
  std::string Refused(const std::string& refusal) const { return outage_.Refused(refusal); }

  // Whether it is not over.
  bool lasts() const { return lasts_; }
  // Whether there is a connection again that has proved nothing yet.
  bool awaits_proof() const { return awaits_proof_; }
  bool by_peer() const { return by_peer_; }
  Clock::time_point deadline() const { return outage_.deadline; }
  // Counts outages.
  uint64_t number() const { return number_; }
  // Messages that are sent again over the connection that is there now.
  size_t again() const { return again_; }

 private:
  const double reconnect_s_;
  LinkOutage outage_;  // the last
  uint64_t number_ = 0;
  bool lasts_ = false;
  bool by_peer_ = false;
  Clock::time_point longest_;  // deadline, if the peer is known to live
  bool awaits_proof_ = false;
  bool continues_ = false;  // the last connection broke before it had proved anything
  Clock::time_point resumed_at_;
  size_t again_ = 0;
};

// Attempts to connect to one peer, until one comes to something: how long to wait before the next,
// and whether who listened there has gone.

// Of one thread.
class Redial {
 public:
  using Clock = AwakeClock;

  // Each pause is twice the one before.
  Redial(Clock::duration first, Clock::duration longest)
      : first_(first), longest_(longest), pause_(first) {}

  // A link broke that was there: nothing is known of who listens now.
  void Begin() {
    pause_ = first_;
    last_error_.clear();
    nobody_listens_ = false;
  }

  // An attempt has failed.
  void Failed(const std::string& error, bool nobody_listens, Clock::time_point now) {
    if (nobody_listens && !nobody_listens_) gone_since_ = now;
    nobody_listens_ = nobody_listens;
    last_error_ = error;
  }
  // What stands in the way will pass soon.
  void Hurry() { pause_ = first_; }
  // An attempt has come to something.
  void Succeeded() { nobody_listens_ = false; }

  // Before the next attempt.
  Clock::duration NextPause() {
    const Clock::duration pause = pause_;
    pause_ = std::min(pause_ * 2, longest_);
    return pause;
  }

  // Of the last attempt.
  bool nobody_listens() const { return nobody_listens_; }
  const std::string& last_error() const { return last_error_; }
  // Whether the process that listened there has ended.
  bool IsListenerGone(Clock::time_point now) const {
    return nobody_listens_ && now - gone_since_ >= kListenerGoneTime;
  }

 private:
  const Clock::duration first_;
  const Clock::duration longest_;
  Clock::duration pause_;
  std::string last_error_;
  bool nobody_listens_ = false;
  Clock::time_point gone_since_;
};

// Between which NICs the connections of two nodes go.

// From a NIC of this host to one of a peer's.
struct NicPair {
  std::string from;  // the address of this host's; empty: the kernel chooses
  std::string to;    // an address, or a name
};
inline bool operator==(const NicPair& a, const NicPair& b) {
  return a.from == b.from && a.to == b.to;
}

// How many connections it takes at least to use all NICs of both nodes; 1 where one of them has
// told of none.
int LeastConnections(const std::vector<Nic>& from, const std::vector<Nic>& to);

// For each of `count` connections to `peer` the pairs that it may take, the one that it should take
// first.  Each NIC gets connections in proportion to its rate; NICs in different subnets are paired
// only where no two are in the same one, and where the peer is on this host each NIC goes with
// itself.  Of equally good pairs the connections begin with another
// one for each `turn`.  The last pair is always what the kernel chooses.
std::vector<std::vector<NicPair>> PairNics(const std::vector<Nic>& from, const Node& peer,
                                           int count, int turn);

// Where a connection dials, over TCP or RDMA, and when next: one pair of NICs after another at
// once, and the first again after a pause.

// Of one thread at a time.
class DialPlan {
 public:
  using Clock = Redial::Clock;

  // One address of a pair's peer: a name may have several.
  struct Route {
    std::string from;  // empty: the kernel chooses
    Address to;
    bool is_home = false;  // of the first pair

    // "10.0.0.2:9000", "10.0.0.1 to 10.0.0.2:9000"
    std::string Text() const { return (from.empty() ? "" : from + " to ") + to.Text(); }
  };

  // How long to pause after the first round of attempts, and at most.
  DialPlan(Clock::duration first, Clock::duration longest);

  // Names are looked up by another thread, again after each round of attempts: a host may come
  // back with another address.
  void Begin(const std::vector<NicPair>& pairs, int port, Clock::time_point deadline);
  // Pairs that are as good as the first, to try when that fails.
  void Add(const std::vector<NicPair>& pairs);
  // The connection was there, and broke.  `elsewhere`: nothing answers on its pair of NICs, so that
  // another is tried first.
  void Restart(bool elsewhere);
  // Restarts with the first pair, of which the connection was away.
  void GoHome();

  // The route to try now.  Throws UnknownHost while no name is known.
  const Route& Current();
  // What is about an earlier attempt is not about this one.
  uint64_t attempt() const { return attempt_; }
  void NextAttempt() { ++attempt_; }

  // An attempt has failed; `nobody_listens`: its address says so.  Returns when to make the next.
  Clock::time_point Failed(const std::string& error, bool nobody_listens, Clock::time_point now);
  // The peer asks to be tried again soon, over the same route.  Returns when.
  Clock::time_point Postponed(const std::string& error, Clock::time_point now);
  void Succeeded(Clock::time_point now);

  const Redial& redial() const { return redial_; }
  // Of the first connection.
  Clock::time_point deadline() const { return deadline_; }

  bool has_several_pairs() const { return pairs_.size() > 1; }
  // Whether the current route is not of the first pair; `home` is then.
  bool is_away() const { return !routes_.empty() && !routes_[next_].is_home; }
  const Route& home() const { return routes_.front(); }
  // How long to wait before it is tried whether the first pair works again: longer each time,
  // unless a connection has lasted there.
  Clock::duration NextLook();

 private:
  struct Pair {
    NicPair ends;
    bool is_home = false;
  };

  // Begins to look names up, unless that is going on.
  void LookUp();
  // Takes what was looked up, if it is there.
  void TakeNames();
  // Of the pairs, as far as their addresses are known.  The current one stays so, if it still is
  // one.
  void MakeRoutes();

  std::vector<Pair> pairs_;
  int port_ = 0;
  std::optional<NameLookup> lookup_;
  NameLookup::Found names_;
  std::string unknown_ = "its address is not known yet";  // why there are no routes
  std::vector<Route> routes_;
  size_t start_ = 0;  // of this round of attempts
  size_t next_ = 0;
  uint64_t attempt_ = 0;
  Clock::time_point deadline_;
  Redial redial_;
  Clock::duration look_;
  Clock::time_point home_since_;
};

}  // namespace ps

#endif  // BYTEPS_NET_LINK_DIAL_PLAN_H_
