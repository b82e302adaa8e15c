// Greeter: a peer that connected and has not proved yet that it is of this job.
#ifndef BYTEPS_NET_TCP_GREETER_H_
#define BYTEPS_NET_TCP_GREETER_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "byteps/net/auth/secret.h"
#include "byteps/net/tcp/fd.h"
#include "byteps/net/tcp/leftovers.h"
#include "byteps/net/tcp/pending_peers.h"
#include "byteps/net/tcp/poller.h"
#include "byteps/net/tcp/stream.h"
#include "byteps/net/tcp/wire.h"

namespace ps {
namespace tcp {

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
