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

// Resources shared by a process's endpoints.
//
// Each device has a context, a protection domain with the registrations, a listener for each
// address that this node uses, and a channel for each poller. Each connection has a queue pair, a
// completion queue and slots.
struct Transport {
  Transport(Devices devices, const Settings& settings);
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  // Returns null if the process does not use the device.
  std::shared_ptr<Device> DeviceOf(const ibv_context* context) const;
  // Returns the poller for an endpoint whose first connection uses this device.
  Poller* PollerOf(Plane plane, const Device& device) const;
  // Moves the data plane's pollers to the NUMA nodes of their devices' NICs, if the host has
  // several nodes.
  void RunNearDevices(const std::vector<HostNic>& nics, const NumaNodes& nodes);

  const Devices devices;
  const std::shared_ptr<Registrar> registrar;
  const std::shared_ptr<Pool> pool;
  // Pollers: first that of the control plane, then one per device for the data plane.
  std::vector<std::unique_ptr<Poller>> pollers;
};

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_TRANSPORT_H_
