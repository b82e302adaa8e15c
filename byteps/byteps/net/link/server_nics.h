#ifndef BYTEPS_NET_LINK_SERVER_NICS_H_
#define BYTEPS_NET_LINK_SERVER_NICS_H_

#include <set>
#include <string>

#include "byteps/net/link/nic_settings.h"

namespace ps {

// Totals over all NICs of a server.
struct ServerNics {
  int mbps = 0;         // rate of all NICs; 0: unknown
  int numa_nodes = 0;   // number of NUMA nodes with these NICs
  std::set<int> cores;  // cores of these NUMA nodes; empty: unknown

  // Returns the NICs of a server at this address of the host. Throws Error if BYTEPS_NICS names a
  // NIC that the host does not have.
  static ServerNics At(const std::string& address, const NicSettings& settings);
};

}  // namespace ps

#endif  // BYTEPS_NET_LINK_SERVER_NICS_H_
