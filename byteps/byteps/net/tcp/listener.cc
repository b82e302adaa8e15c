#include "byteps/net/tcp/listener.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "byteps/base/log.h"
#include "byteps/net/link/net_address.h"

namespace ps {
namespace tcp {
namespace {

// Pause while this process can open no file. Connections wait in the kernel's queue.
constexpr auto kPause = std::chrono::milliseconds(100);
// Pause while there is no room for unauthenticated connections.
constexpr auto kShortPause = std::chrono::milliseconds(5);
// Number of connections accepted at a time. The thread serves more than that at a time, so accepted
// connections make progress before others are accepted.
constexpr int kTurn = 16;

}  // namespace

Listener::Listener(Poller* poller, Fd fd, MayAccept may_accept, OnAccept on_accept)
    : poller_(poller),
      fd_(std::move(fd)),
      may_accept_(std::move(may_accept)),
      on_accept_(std::move(on_accept)) {}

void Listener::Start() { poller_->Watch(fd_.get(), shared_from_this()); }

void Listener::Stop() { poller_->Forget(fd_.get()); }

bool Listener::OnReady(uint32_t /*events*/) {
  for (int i = 0; i < kTurn; ++i) {
    if (!may_accept_()) {
      Pause(kShortPause);
      return false;
    }
    Address peer;
    peer.length = sizeof(peer.storage);
    Fd fd = Fd::Make([&] {
      return accept4(fd_.get(), reinterpret_cast<sockaddr*>(&peer.storage), &peer.length,
                     SOCK_NONBLOCK | SOCK_CLOEXEC);
    });
    if (fd) {
      on_accept_(std::move(fd), peer);
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
    if (errno == EINTR || errno == ECONNABORTED || errno == EPROTO) continue;
    if (!complained_) {
      complained_ = true;
      BPS_LOG(WARNING) << "a connection cannot be accepted: " << strerror(errno)
                       << "; raise the limit of open files (ulimit -n)";
    }
    Pause(kPause);
    return false;
  }
  return true;
}

void Listener::Pause(Poller::Clock::duration pause) {
  if (paused_) return;
  paused_ = true;
  poller_->At(Poller::Clock::now() + pause, [self = shared_from_this()] {
    self->paused_ = false;
    self->TakeTurn();
  });
}

void Listener::TakeTurn() {
  if (OnReady(0)) poller_->Post([self = shared_from_this()] { self->TakeTurn(); });
}

}  // namespace tcp
}  // namespace ps
