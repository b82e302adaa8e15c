#ifndef BYTEPS_NET_TCP_PATH_PROBE_H_
#define BYTEPS_NET_TCP_PATH_PROBE_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "byteps/net/link/dial_plan.h"
#include "byteps/net/tcp/fd.h"
#include "byteps/net/tcp/poller.h"

namespace ps {
namespace tcp {

// Test whether a peer accepts connections between two NICs. It connects, sends nothing, and closes.
class PathProbe : public Pollable, public std::enable_shared_from_this<PathProbe> {
 public:
  using Done = std::function<void(bool works)>;

  // Calls `done` once, in the poller's thread, within 2 s, unless the poller stops before.
  static void Start(const std::shared_ptr<Poller>& poller, const DialPlan::Route& route, Done done);

  PathProbe(const std::shared_ptr<Poller>& poller, Fd fd, Done done);

  bool OnReady(uint32_t events) override;

 private:
  void End(bool works);

  const std::shared_ptr<Poller> poller_;
  Fd fd_;
  Done done_;  // empty once called
};

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_PATH_PROBE_H_
