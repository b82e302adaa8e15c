// DialPlan: the pairs of NICs over which a connection dials, and the times of its attempts. TCP and
// RDMA use it.
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

// A NIC of this host and a NIC of the peer's host, which a connection may use together.
struct NicPair {
  std::string from;  // address of this host's NIC; "": the kernel chooses
  std::string to;    // address or host name of the peer
};
inline bool operator==(const NicPair& a, const NicPair& b) {
  return a.from == b.from && a.to == b.to;
}

// Returns the least number of connections that use all NICs of both nodes. Returns 1 if either node
// has announced no NICs.
int LeastConnections(const std::vector<Nic>& from, const std::vector<Nic>& to);

// Returns a list of candidate pairs for each of `count` connections to `peer`, the preferred pair
// first. A NIC gets a number of connections in proportion to its rate. NICs of different subnets
// are paired only if no two NICs share a subnet. If both nodes are on one host, a NIC is paired
// with itself. `turn` chooses which of several equally good pairs comes first. With the last pair
// of a list, the kernel always chooses.
std::vector<std::vector<NicPair>> PairNics(const std::vector<Nic>& from, const Node& peer,
                                           int count, int turn);

// Schedule of a connection's attempts, over TCP or RDMA. It tries all pairs of NICs in a row,
// pauses, and starts again with the first pair.
//
// Not thread-safe.
class DialPlan {
 public:
  using Clock = Redial::Clock;

  // A pair with one resolved address of the peer. A host name may have several.
  struct Route {
    std::string from;  // "": the kernel chooses
    Address to;
    bool is_home = false;  // the route belongs to the first pair of NICs

    // Returns text such as "10.0.0.2:9000", or "10.0.0.1 to 10.0.0.2:9000".
    std::string Text() const { return (from.empty() ? "" : from + " to ") + to.Text(); }
  };

  // `first`: the pause after the first round of attempts. `longest`: the limit of later pauses.
  DialPlan(Clock::duration first, Clock::duration longest);

  // Begins the attempts. Another thread resolves host names. It does so again after each round of
  // attempts, because a host may return with another address.
  void Begin(const std::vector<NicPair>& pairs, int port, Clock::time_point deadline);
  // Adds pairs, which are as good as the first pair.
  void Add(const std::vector<NicPair>& pairs);
  // Restarts after an established connection broke. `elsewhere`: whether the connection's pair of
  // NICs is dead, so that another pair is tried first.
  void Restart(bool elsewhere);
  // Restarts with the first pair of NICs, after the connection has used another pair.
  void GoHome();

  // Returns the route to try now. Throws UnknownHost while no name is resolved.
  const Route& Current();
  // Number of the current attempt. The caller ignores results of earlier attempts.
  uint64_t attempt() const { return attempt_; }
  void NextAttempt() { ++attempt_; }

  // Records a failed attempt. `nobody_listens`: whether the address refused the connection. Returns
  // the time of the next attempt.
  Clock::time_point Failed(const std::string& error, bool nobody_listens, Clock::time_point now);
  // Records that the peer asked to retry soon on the same route. Returns the time of the next
  // attempt.
  Clock::time_point Postponed(const std::string& error, Clock::time_point now);
  void Succeeded(Clock::time_point now);

  const Redial& redial() const { return redial_; }
  // Deadline of the first connection.
  Clock::time_point deadline() const { return deadline_; }

  bool has_several_pairs() const { return pairs_.size() > 1; }
  // Returns whether the current route uses another pair than the first.
  bool is_away() const { return !routes_.empty() && !routes_[next_].is_home; }
  const Route& home() const { return routes_.front(); }
  // Returns the pause before the first pair is probed again. The pause grows with each probe, until
  // a connection over the first pair has lasted.
  Clock::duration NextLook();

 private:
  struct Pair {
    NicPair ends;
    bool is_home = false;
  };

  // Starts a lookup of the names unless one is running.
  void LookUp();
  // Takes the result of a finished lookup.
  void TakeNames();
  // Builds the routes from all addresses known by now. Keeps the current route if it still exists.
  void MakeRoutes();

  std::vector<Pair> pairs_;
  int port_ = 0;
  std::optional<NameLookup> lookup_;
  NameLookup::Found names_;
  std::string unknown_ = "its address is not known yet";  // reason why there are no routes
  std::vector<Route> routes_;
  size_t start_ = 0;  // index of the route with which this round of attempts began
  size_t next_ = 0;
  uint64_t attempt_ = 0;
  Clock::time_point deadline_;
  Redial redial_;
  Clock::duration look_;
  Clock::time_point home_since_;
};

}  // namespace ps

#endif  // BYTEPS_NET_LINK_DIAL_PLAN_H_
