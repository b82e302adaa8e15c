// Peers that connect: where, how many at once, and until they have proved that they are of this
// job.
#ifndef BYTEPS_NET_TCP_GREETER_H_
#define BYTEPS_NET_TCP_GREETER_H_

#include <array>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>

#include "byteps/net/auth/secret.h"
#include "byteps/net/tcp/socket.h"
#include "byteps/net/tcp/wire.h"

namespace ps {
namespace tcp {

// A socket at which peers connect.
class Listener : public Pollable, public std::enable_shared_from_this<Listener> {
 public:
  // Called in the poller's thread with each connection that came, and the address of its peer.
  using OnAccept = std::function<void(Fd, const Address&)>;

  // Likewise, before each: while it says false, connections wait in the kernel's queue.
  using MayAccept = std::function<bool()>;

  Listener(Poller* poller, Fd fd, MayAccept may_accept, OnAccept on_accept);

  void Start();
  void Stop();

  bool OnReady(uint32_t events) override;

 private:
  void Pause(Poller::Clock::duration pause);
  void TakeTurn();

  Poller* const poller_;
  const Fd fd_;
  const MayAccept may_accept_;
  const OnAccept on_accept_;
  bool paused_ = false;
  bool complained_ = false;
};

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

// A peer that connected and has not yet proved that it is of this job.
//
// It holds a socket and a few bytes for a short time, and nothing else: what the proof is for
// (memory, a place among the peers, a word with the scheduler) begins when it is there.  One that
// says nothing costs no more than its socket: not even encryption has begun.

class Greeter : public PendingPeer, public std::enable_shared_from_this<Greeter> {
 public:
  struct Host {
    // What is told to a peer that connects, and has said this: the job and this process.
    std::function<Challenge(const Hello&)> challenge;
    // The peer has proved what it said.  Takes the socket, or leaves it and returns why not.
    std::function<std::string(const StreamPtr&, const Hello&)> admit;
    // It is gone, one way or the other.
    std::function<void(const Greeter*)> done;
    const auth::Secret* secret = nullptr;
    std::shared_ptr<const tls::Context> tls;  // null: nothing is encrypted
  };

  // `host` outlives the poller's thread, in which all of it is called.
  // `from`: the peer's address.
  Greeter(const Host* host, std::shared_ptr<Poller> poller, Fd fd, std::string from);

  void Start();

  void End(const std::string& reason) override;
  void ResetOnEnd() override;
  bool answered() const override { return phase_ == Phase::kRefused; }
  bool OnReady(uint32_t events) override;

 private:
  enum class Phase { kSilent, kHandshake, kHello, kProof, kRefused, kDone };

  // True: there may be more.
  bool ShakeHands();
  bool Read();
  void OnHello();
  void OnProof();
  void Refuse(const std::string& bytes, const std::string& reason);

  const Host* const host_;
  const std::shared_ptr<Poller> poller_;
  const int number_;  // of the socket
  const std::string from_;
  // All below is of the poller's thread.
  Fd fd_;             // until it says something
  StreamPtr socket_;  // since then
  Phase phase_ = Phase::kSilent;
  std::array<char, kHelloBytes> buffer_;
  size_t there_ = 0;
  Hello hello_;
  std::string said_;
  std::string refused_because_;
  Leftovers leftovers_;
};

}  // namespace tcp
}  // namespace ps

#endif  // BYTEPS_NET_TCP_GREETER_H_
