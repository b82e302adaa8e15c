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

// A flood is one line of the log, and another after so long.
constexpr auto kWarnAgain = std::chrono::minutes(1);

// The connections of one process that have not authenticated yet: how many there may be at once,
// and which one is closed to admit the next.
//
// Connections are accepted as they come, so that an honest node does not wait in the kernel's queue
// behind silent ones.  When there is no room, the address with the most pending connections loses
// its oldest one: a flood from one address costs the others nothing, and one from the honest nodes'
// own address leaves each connection (room / connections per second) to say what it has to.

class PendingPeer : public Pollable {
 public:
  // Closes its socket, for this reason, and calls PendingPeers::Remove.  Poller's thread.
  virtual void End(const std::string& reason) = 0;
  // Before End: the socket is closed by a reset, of which no trace is kept in the kernel.
  virtual void ResetOnEnd() = 0;
  // It was answered, and stays only until it has read the answer.
  virtual bool answered() const = 0;
};

// All in the poller's thread.
class PendingPeers {
 public:
  using Ptr = std::shared_ptr<PendingPeer>;
  struct Limits {
    size_t room = 0;                  // connections at once
    Poller::Clock::duration least{};  // each stays so long, also where there is no room
    Poller::Clock::duration time{};   // for each, at most
    const char* late = "";            // why one is ended after that time
    const char* has_not_done = "";    // what all of them have in common, for the log
  };

  // `poller` outlives it, and so does it the poller's thread.
  PendingPeers(Poller* poller, const Limits& limits) : poller_(poller), limits_(limits) {}

  // Whether there is room, or one that can go.
  bool MayAdd() const;
  // Ends another one if there is no room.
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

// Whose connection it is, for fairness and the log: an IPv4 address, or the network of an IPv6 one
// (64 bits), all of which one host may have.
std::string OriginOf(const Address& address);

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_PENDING_PEERS_H_
