#include "byteps/net/tcp/pollers.h"

#include "byteps/base/log.h"
#include "byteps/net/link/nics.h"

namespace ps {
namespace tcp {

Pollers::Pollers(int threads, size_t pool_bytes) : pool_bytes_(pool_bytes) {
  const auto pool = std::make_shared<MemoryPool>(pool_bytes);
  for (int i = 0; i < threads; ++i) {
    pollers_.push_back(std::make_shared<Poller>(i));
    all_.places.push_back({pollers_.back(), pool});
  }
}

void Pollers::ServeNics(const std::vector<HostNic>& nics, const NumaNodes& nodes) {
  if (!nodes_.empty()) return;  // this is a second call, after a failed Bind
  const auto places = PlaceThreads(nics, nodes, AllowedCores(), size());
  if (places.front().numa < 0) return;
  std::map<int, std::shared_ptr<MemoryPool>> pools;
  for (const ThreadPlace& place : places) pools[place.numa] = nullptr;
  for (auto& pool : pools) pool.second = std::make_shared<MemoryPool>(pool_bytes_ / pools.size());
  for (size_t i = 0; i < places.size(); ++i) {
    all_.places[i].pool = pools[places[i].numa];
    of_node_[places[i].numa].places.push_back(all_.places[i]);
    if (!pollers_[i]->RunOn(places[i].cores)) {
      BPS_LOG(DEBUG) << "I/O thread " << i << " cannot run on NUMA node " << places[i].numa;
    }
  }
  for (const HostNic& nic : nics) {
    nodes_[nic.nic.address] = nic.numa;
    BPS_LOG(DEBUG) << of_node_[nic.numa].places.size() << " I/O threads on NUMA node " << nic.numa
                   << " serve " << nic.name;
  }
}

Pollers::Place Pollers::Next(const std::string& address) {
  const auto node = nodes_.find(address);
  Group& group = node == nodes_.end() ? all_ : of_node_.at(node->second);
  return group.places[group.next++ % group.places.size()];
}

void Pollers::ServeReady() {
  for (const auto& poller : pollers_) poller->ServeReady();
}

void Pollers::Stop() {
  for (const auto& poller : pollers_) poller->Stop();
}

}  // namespace tcp
}  // namespace ps
