#ifndef BYTEPS_NET_TCP_LISTENER_H_
#define BYTEPS_NET_TCP_LISTENER_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "byteps/net/link/net_address.h"
#include "byteps/net/tcp/fd.h"
#include "byteps/net/tcp/poller.h"

namespace ps {
namespace tcp {

// A listening socket.
class Listener : public Pollable, public std::enable_shared_from_this<Listener> {
 public:
  // Called by the poller's thread for each accepted connection, with the peer's address.
  using OnAccept = std::function<void(Fd, const Address&)>;

  // Called by the poller's thread before each accept. While it returns false, connections wait in
  // the kernel's queue.
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

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_LISTENER_H_
