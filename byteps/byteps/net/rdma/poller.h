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

// Thread that handles completions of one plane's endpoints, on all devices.
//
// Each connection has its own completion queue, so that no queue can overflow. The queues of a
// device share a channel, and the thread sleeps on the channels of all devices. So an endpoint
// keeps its poller when it changes devices.
class Poller {
 public:
  // `spin`: whether the thread never sleeps.
  Poller(const Devices& devices, Plane plane, bool spin);
  // Stops the thread, and drops the endpoints even if requests are outstanding.
  ~Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // Restricts the thread to these cores. Returns false if the kernel refuses.
  bool RunOn(const std::set<int>& cores);

  // Returns the channel of a device, one of the constructor's.
  ibv_comp_channel* channel(const Device& device);

  // Watches the endpoint until it is finished. Thread-safe.
  void Add(std::shared_ptr<Endpoint> endpoint);
  // Makes the thread check all endpoints once, because an endpoint may have finished without a
  // completion.
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
  // Returns whether there may be more completions.
  bool Serve(const std::shared_ptr<Endpoint>& endpoint);

  const bool spin_;
  std::deque<Channel> channels_;
  std::vector<pollfd> sources_;  // descriptors that wake the thread
  int wake_fd_ = -1;
  std::atomic<bool> stop_{false};
  // Only the thread uses these two.
  std::set<Endpoint*> watched_;  // endpoints whose AskWhatArrived is called at ask_at_
  Endpoint::Clock::time_point ask_at_;
  Mutex mu_;
  std::map<Endpoint*, std::shared_ptr<Endpoint>> endpoints_ PS_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_POLLER_H_
