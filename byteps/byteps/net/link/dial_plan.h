// DialPlan: between which NICs a connection dials, over TCP or RDMA, and when next.
#ifndef BYTEPS_NET_LINK_DIAL_PLAN_H_
#define BYTEPS_NET_LINK_DIAL_PLAN_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "byteps/net/link/name_lookup.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/link/redial.h"
#include "ps/internal/message.h"

namespace ps {

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
