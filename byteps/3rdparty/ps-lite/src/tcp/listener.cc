#include "./listener.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include "dmlc/logging.h"

namespace ps {
namespace tcp {
namespace {

// Who connects while no file can be opened waits in the kernel's queue for so long.
constexpr auto kPause = std::chrono::milliseconds(100);
// The same while too many have not said who they are.
constexpr auto kShortPause = std::chrono::milliseconds(5);

}  // namespace

Listener::Listener(Poller* poller, Fd fd, MayAccept may_accept, OnAccept on_accept)
    : poller_(poller),
      fd_(std::move(fd)),
      may_accept_(std::move(may_accept)),
      on_accept_(std::move(on_accept)) {}

void Listener::Start() { poller_->Watch(fd_.get(), shared_from_this()); }

void Listener::Stop() { poller_->Forget(fd_.get()); }

bool Listener::OnReady(uint32_t /*events*/) {
  while (true) {
    if (!may_accept_()) {
      Pause(kShortPause);
      return false;
    }
    Fd fd(accept4(fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd) {
      on_accept_(std::move(fd));
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
    if (errno == EINTR || errno == ECONNABORTED || errno == EPROTO) continue;
    if (!complained_) {
      complained_ = true;
      LOG(WARNING) << "a connection cannot be accepted: " << strerror(errno)
                   << "; raise the limit of open files (ulimit -n)";
    }
    Pause(kPause);
    return false;
  }
}

void Listener::Pause(Poller::Clock::duration pause) {
  if (paused_) return;
  paused_ = true;
  poller_->At(Poller::Clock::now() + pause, [self = shared_from_this()] {
    self->paused_ = false;
    self->OnReady(0);
  });
}

}  // namespace tcp
}  // namespace ps
