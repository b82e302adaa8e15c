// Rates of this host's NICs, for the code that chooses the servers to start here.
#ifndef BYTEPS_NET_LINK_SERVER_NICS_H_
#define BYTEPS_NET_LINK_SERVER_NICS_H_

#include <set>
#include <string>

#include "byteps/net/link/nic_settings.h"

namespace ps {

// NICs that a server uses, all together.
struct ServerNics {
  int mbps = 0;         // 0: not known
  int numa_nodes = 0;   // that they are attached to
  std::set<int> cores;  // of these nodes; empty: not known

  // NICs of a server at this address of the host.  Throws Error where BYTEPS_NICS names others
  // than there are.
  static ServerNics At(const std::string& address, const NicSettings& settings);
};

}  // namespace ps

#endif  // BYTEPS_NET_LINK_SERVER_NICS_H_
