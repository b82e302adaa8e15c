#include "byteps/net/tcp/path_probe.h"

#include <chrono>
#include <memory>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/net/link/dial_plan.h"
#include "byteps/net/tcp/socket.h"

namespace ps {
namespace tcp {
namespace {

constexpr auto kTime = std::chrono::seconds(2);

}  // namespace

PathProbe::PathProbe(const std::shared_ptr<Poller>& poller, Fd fd, Done done)
    : poller_(poller), fd_(std::move(fd)), done_(std::move(done)) {}

void PathProbe::Start(const std::shared_ptr<Poller>& poller, const DialPlan::Route& route,
                      Done done) {
  const auto probe =
      std::make_shared<PathProbe>(poller, BeginConnect(route.to, route.from), std::move(done));
  auto when = Poller::Clock::now();
  if (probe->fd_) {
    try {
      poller->Watch(probe->fd_.get(), probe);
      when += kTime;
    } catch (const Error&) {  // no file descriptors left: counts as no answer
    }
  }
  poller->At(when, [probe] { probe->End(false); });
}

bool PathProbe::OnReady(uint32_t events) {
  if (events != 0) End(ConnectError(fd_.get()) == 0);
  return false;
}

void PathProbe::End(bool works) {
  if (!done_) return;
  const auto keep = shared_from_this();
  if (fd_) poller_->Forget(fd_.get());
  // A reset leaves no state at the peer. The probe has sent the peer no byte.
  if (fd_) ResetOnClose(fd_.get());
  fd_.Close();
  std::exchange(done_, nullptr)(works);
}

}  // namespace tcp
}  // namespace ps
