// A connection that is away from its first pair of NICs, and goes back.
#include <algorithm>
#include <memory>

#include "byteps/base/mutex.h"
#include "byteps/net/link/link_outage.h"
#include "byteps/net/tcp/connection.h"
#include "byteps/net/tcp/path_probe.h"

namespace ps {
namespace tcp {

double Connection::Silence() const {
  if (!dial_.has_several_pairs()) return settings_->silence_s;
  return std::min(settings_->silence_s, settings_->switch_s);
}

void Connection::AddPairs(const std::vector<NicPair>& pairs) {
  poller_->Post([self = shared_from_this(), pairs] {
    self->dial_.Add(pairs);
    // The socket that is there can be given up sooner now.
    const Socket socket = self->CurrentSocket();
    if (socket) SetOptions(socket->fd(), self->Silence());
  });
}

// Poller's thread, like all below.
void Connection::LookHome() {
  std::weak_ptr<Connection> weak = shared_from_this();
  const uint64_t epoch = Epoch();
  poller_->At(Clock::now() + dial_.NextLook(), [weak, epoch] {
    const ConnectionPtr self = weak.lock();
    // Over another socket it looks anew.
    if (self && self->Epoch() == epoch && self->open()) self->TryHome();
  });
}

void Connection::WarnThatAway() {
  LogAway(peer_, dial_.home().Text(), dial_.redial().last_error(), address());
}

void Connection::TryHome() {
  std::weak_ptr<Connection> weak = shared_from_this();
  const uint64_t epoch = Epoch();
  PathProbe::Start(poller_, dial_.home(), [weak, epoch](bool works) {
    const ConnectionPtr self = weak.lock();
    if (!self || self->Epoch() != epoch || !self->open()) return;
    works ? self->GoHome() : self->LookHome();
  });
}

// Another outage, by this end's will: what is in flight over the socket is sent again as after any.
void Connection::GoHome() {
  bool ends = false;
  {
    MutexLock lock(&receive_mu_);
    ends = reader_.goodbye();
  }
  {
    MutexLock lock(&mu_);
    ends = ends || state_ != State::kOpen || closing_.goodbye_sent || closing_.when_flushed;
  }
  const LinkFault fault = LinkFault::kBroken;
  const auto patience = ends ? Clock::duration::zero() : owner_->Patience(this, fault);
  if (patience <= Clock::duration::zero()) return;
  LogHome(peer_, dial_.home().Text());
  BeginOutage({"it went back to its NIC", false, false}, patience);
  Detach(State::kDialing);
  hello_.resumes = true;
  dial_.GoHome();
  TryNext();
}

}  // namespace tcp
}  // namespace ps
