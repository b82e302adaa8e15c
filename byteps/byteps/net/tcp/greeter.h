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

// Peer that has connected but not authenticated yet.
//
// Such a peer costs this process a socket and a few bytes, for a short time. Only an authenticated
// peer gets memory to receive into, an entry in the peer table, and contact with the scheduler. A
// peer that has sent nothing costs only its socket, because encryption starts with its first byte.

class Greeter : public PendingPeer, public std::enable_shared_from_this<Greeter> {
 public:
  struct Host {
    // Returns the challenge for a peer that has sent this Hello. It contains the job and this
    // process.
    std::function<Challenge(const Hello&)> challenge;
    // Called when the peer has authenticated. Takes the socket and returns "", or returns the
    // reason to refuse the peer.
    std::function<std::string(const StreamPtr&, const Hello&)> admit;
    // Called when the greeter is finished: the peer was accepted, refused, or is gone.
    std::function<void(const Greeter*)> done;
    const auth::Secret* secret = nullptr;
    std::shared_ptr<const tls::Context> tls;  // null: no encryption
  };

  // `host` must outlive the poller's thread, which calls its functions. `from`: the peer's address.
  Greeter(const Host* host, std::shared_ptr<Poller> poller, Fd fd, std::string from);

  void Start();

  void End(const std::string& reason) override;
  void ResetOnEnd() override;
  bool answered() const override { return phase_ == Phase::kRefused; }
  bool OnReady(uint32_t events) override;

 private:
  enum class Phase { kSilent, kHandshake, kHello, kProof, kRefused, kDone };

  // Continues the TLS handshake. Returns true if there may be more to read.
  bool ShakeHands();
  bool Read();
  void OnHello();
  void OnProof();
  void Refuse(const std::string& bytes, const std::string& reason);

  const Host* const host_;
  const std::shared_ptr<Poller> poller_;
  const int number_;  // number of the socket
  const std::string from_;
  // Only the poller's thread uses these members.
  Fd fd_;             // the socket, until the peer sends something
  StreamPtr socket_;  // the socket, after the peer has sent something
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
