#include "byteps/net/link/server_nics.h"

#include <algorithm>
#include <set>
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
  return {chosen.host_mbps, static_cast<int>(nodes.size())};
}

}  // namespace ps
