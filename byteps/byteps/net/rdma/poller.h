#ifndef BYTEPS_NET_RDMA_POLLER_H_
#define BYTEPS_NET_RDMA_POLLER_H_

#include <poll.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/net/link/dial_plan.h"
#include "byteps/net/link/nics.h"
#include "byteps/net/rdma/endpoint.h"

namespace ps {
namespace rdma {

// A thread that handles what completes on endpoints of one plane, by whichever devices they go.
//
// Each connection has a completion queue of its own, which can thus never overflow; those of one
// device tell of completions through one channel.  The thread sleeps on the channels of all
// devices: an endpoint that moves to another device stays with it.
class Poller {
 public:
  // `spin`: never sleep.
  Poller(const Devices& devices, Plane plane, bool spin);
  // Stops.  Endpoints whose requests have not completed are let go of.
  ~Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // From now on.  False: it may not.
  bool RunOn(const std::set<int>& cores);

  // `device` is one of those.
  ibv_comp_channel* channel(const Device& device);

  // Any thread.  An endpoint is let go of when it is finished.
  void Add(std::shared_ptr<Endpoint> endpoint);
  // Looks at all endpoints once, for those that have finished by other means.
  void Wake();
  size_t size();

 private:
  void Run();
  struct Channel {
    explicit Channel(const Device& device);

    const Device* const device;
    const Owned<ibv_comp_channel> channel;
    const ClosedInChild in_child;
  };

  void Sleep();
  void AskWatched();
  void TakeEvents(std::set<Endpoint*>* ready);
  std::shared_ptr<Endpoint> Find(Endpoint* endpoint);
  // Whether there may be more.
  bool Serve(const std::shared_ptr<Endpoint>& endpoint);

  const bool spin_;
  std::deque<Channel> channels_;
  std::vector<pollfd> sources_;  // that wake the thread
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
