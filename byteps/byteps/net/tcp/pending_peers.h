#ifndef BYTEPS_NET_TCP_PENDING_PEERS_H_
#define BYTEPS_NET_TCP_PENDING_PEERS_H_

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>

#include "byteps/net/link/net_address.h"
#include "byteps/net/tcp/poller.h"

namespace ps {
namespace tcp {

// Time between two warnings about a flood of unauthenticated connections.
constexpr auto kWarnAgain = std::chrono::minutes(1);

// Unauthenticated connection. A process limits the number of such connections: at the limit, it
// closes one for each new one.
//
// All connections are accepted at once, so that an honest node does not queue in the kernel behind
// silent connections. At the limit, the address with the most pending connections loses its oldest
// one. So a flood from one address does not affect nodes at other addresses. During a flood from
// its own address, a node still has limit / (connections per second of the flood) seconds to
// authenticate.

class PendingPeer : public Pollable {
 public:
  // Closes the socket for this reason, and calls PendingPeers::Remove. The poller's thread calls
  // this.
  virtual void End(const std::string& reason) = 0;
  // Call before End to close the socket by a reset, which leaves no state in the kernel.
  virtual void ResetOnEnd() = 0;
  // Returns whether the peer was refused, so that the socket stays open only until the peer has
  // read the refusal.
  virtual bool answered() const = 0;
};

// Unauthenticated connections of a process. Only one poller's thread uses this.
class PendingPeers {
 public:
  using Ptr = std::shared_ptr<PendingPeer>;
  struct Limits {
    size_t room = 0;                  // limit of the number of connections
    Poller::Clock::duration least{};  // minimum time for a connection, even at the limit
    Poller::Clock::duration time{};   // maximum time for a connection
    const char* late = "";            // reason for closing a connection after `time`
    const char* has_not_done = "";    // why connections are pending, for the log
  };

  // `poller` must outlive this object. This object must outlive the poller's thread.
  PendingPeers(Poller* poller, const Limits& limits) : poller_(poller), limits_(limits) {}

  // Returns whether there is room, or a connection that may be closed.
  bool MayAdd() const;
  // Closes another connection if there is no room.
  void Add(Ptr peer, const Address& address);
  void Remove(const PendingPeer* peer);
  void Clear();
  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    Ptr peer;
    std::string origin;
    Poller::Clock::time_point since;
  };
  using Entries = std::list<Entry>;

  void EvictOne();
  void EndLate();
  void ArmTimer();
  void WarnOfFlood(const std::string& origin, size_t of_origin);

  Poller* const poller_;
  const Limits limits_;
  Entries entries_;  // oldest first
  std::unordered_map<const PendingPeer*, Entries::iterator> places_;
  std::unordered_map<std::string, size_t> per_origin_;
  bool timer_armed_ = false;
  uint64_t evicted_ = 0;
  bool warned_ = false;
  Poller::Clock::time_point last_warning_;
};

// Returns the origin of a connection, for fairness and the log: an IPv4 address, or the /64 network
// of an IPv6 address, because one host may have all of it.
std::string OriginOf(const Address& address);

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_PENDING_PEERS_H_
