#ifndef BYTEPS_NET_RDMA_TRANSPORT_H_
#define BYTEPS_NET_RDMA_TRANSPORT_H_

#include <memory>
#include <vector>

#include "byteps/net/link/dial_plan.h"
#include "byteps/net/link/nics.h"
#include "byteps/net/rdma/endpoint.h"
#include "byteps/net/rdma/poller.h"

namespace ps {
namespace rdma {

// The thread that makes connections, takes them, and hears of their end.
//
// What the endpoints of a process share.  Of a device there are its context, its protection domain
// with the registrations in it, a listener for each of its addresses that this node uses, and a
// channel of each poller; of a connection its queue pair, its completion queue and its slots.
struct Transport {
  Transport(Devices devices, const Settings& settings);
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  // Null: the process does not use it.
  std::shared_ptr<Device> DeviceOf(const ibv_context* context) const;
  // For an endpoint whose first connection goes by this device, one of those.
  Poller* PollerOf(Plane plane, const Device& device) const;
  // The pollers of the data plane run on the NUMA nodes of their devices' NICs from now on, where
  // the host has several.
  void RunNearDevices(const std::vector<HostNic>& nics, const NumaNodes& nodes);

  const Devices devices;
  const std::shared_ptr<Registrar> registrar;
  const std::shared_ptr<Pool> pool;
  // One for the control plane, then for the data plane as many as there are devices.
  std::vector<std::unique_ptr<Poller>> pollers;
};

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_TRANSPORT_H_
