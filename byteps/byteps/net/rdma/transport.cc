#include "byteps/net/rdma/transport.h"

#include <algorithm>
#include <utility>

#include "byteps/base/log.h"
#include "byteps/net/rdma/poller.h"

namespace ps {
namespace rdma {

Transport::Transport(Devices used, const Settings& settings)
    : devices(std::move(used)),
      registrar(std::make_shared<Registrar>()),
      pool(std::make_shared<Pool>(devices, registrar, settings.pool_bytes)) {
  pollers.push_back(std::make_unique<Poller>(devices, Plane::kControl, settings.busy_poll));
  for (size_t i = 0; i < devices.size(); ++i) {
    pollers.push_back(std::make_unique<Poller>(devices, Plane::kData, settings.busy_poll));
  }
}

Transport::~Transport() {
  // The registrar stops first, because its tasks may hold endpoints, which must not outlive their
  // pollers.
  registrar->Stop();
}

std::shared_ptr<Device> Transport::DeviceOf(const ibv_context* context) const {
  const auto it = std::find_if(devices.begin(), devices.end(), [context](const auto& device) {
    return device->context() == context;
  });
  return it == devices.end() ? nullptr : *it;
}

Poller* Transport::PollerOf(Plane plane, const Device& device) const {
  if (plane == Plane::kControl) return pollers[0].get();
  const auto it = std::find_if(devices.begin(), devices.end(),
                               [&](const auto& one) { return one.get() == &device; });
  return pollers[1 + static_cast<size_t>(it - devices.begin())].get();
}

void Transport::RunNearDevices(const std::vector<HostNic>& nics, const NumaNodes& nodes) {
  for (size_t i = 0; i < devices.size(); ++i) {
    const auto nic = std::find_if(nics.begin(), nics.end(), [&](const HostNic& one) {
      return one.rdma == devices[i]->name();
    });
    if (nic == nics.end()) continue;
    const ThreadPlace place = PlaceThreads({*nic}, nodes, AllowedCores(), 1).front();
    if (place.numa < 0) continue;
    const bool runs = pollers[1 + i]->RunOn(place.cores);
    BPS_LOG(DEBUG) << "the thread of " << devices[i]->name() << (runs ? " runs" : " cannot run")
                   << " on NUMA node " << place.numa;
  }
}

}  // namespace rdma
}  // namespace ps
