// The thread that handles what completes on the endpoints of one plane.
#ifndef BYTEPS_NET_RDMA_POLLER_H_
#define BYTEPS_NET_RDMA_POLLER_H_

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <thread>

#include "byteps/base/mutex.h"
#include "byteps/net/rdma/endpoint.h"

namespace ps {
namespace rdma {

// Each endpoint has a completion queue of its own, which can thus never overflow; those of
// a plane tell of completions through one channel, on which the thread sleeps.
class Poller {
 public:
  // `spin`: never sleep.
  Poller(const Device& device, Plane plane, bool spin);
  // Stops.  Endpoints whose requests have not completed are let go of.
  ~Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  ibv_comp_channel* channel() { return channel_.get(); }

  // Any thread.  An endpoint is let go of when it is finished.
  void Add(std::shared_ptr<Endpoint> endpoint);
  // Looks at all endpoints once, for those that have finished by other means.
  void Wake();
  size_t size();

 private:
  void Run();
  void Sleep();
  void AskWatched();
  void TakeEvents(std::set<Endpoint*>* ready);
  std::shared_ptr<Endpoint> Find(Endpoint* endpoint);
  // Whether there may be more.
  bool Serve(const std::shared_ptr<Endpoint>& endpoint);

  const bool spin_;
  Owned<ibv_comp_channel> channel_;
  std::optional<ClosedInChild> channel_in_child_;
  int wake_fd_ = -1;
  std::atomic<bool> stop_{false};
  // The thread's own.
  std::set<Endpoint*> watched_;  // each has to be asked what has arrived
  Endpoint::Clock::time_point ask_at_;
  Mutex mu_;
  std::map<Endpoint*, std::shared_ptr<Endpoint>> endpoints_ PS_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_POLLER_H_
