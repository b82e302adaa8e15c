#include "byteps/net/link/server_nics.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "byteps/net/link/nics.h"

namespace ps {

ServerNics ServerNics::At(const std::string& address, const NicSettings& settings) {
  Node server;
  server.role = Node::SERVER;
  server.hostname = address;
  const std::vector<HostNic> there = ListNics();
  const ChosenNics chosen = ChooseNics(there, NicUserFor(server, settings));
  std::set<int> nodes;
  for (const HostNic& nic : there) {
    const auto is_it = [&](const Nic& one) { return one.address == nic.nic.address; };
    if (std::any_of(chosen.nics.begin(), chosen.nics.end(), is_it)) nodes.insert(nic.numa);
  }
  const NumaNodes cores_of = ReadNumaNodes();
  std::set<int> cores;
  for (const int node : nodes) {
    const auto of_node = cores_of.find(node);
    if (of_node == cores_of.end()) return {chosen.host_mbps, static_cast<int>(nodes.size()), {}};
    cores.insert(of_node->second.begin(), of_node->second.end());
  }
  return {chosen.host_mbps, static_cast<int>(nodes.size()), std::move(cores)};
}

}  // namespace ps
