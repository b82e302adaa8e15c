// On which NUMA node the threads of a NIC run.
#ifndef BYTEPS_NET_LINK_NUMA_H_
#define BYTEPS_NET_LINK_NUMA_H_

#include <map>
#include <set>
#include <string>
#include <vector>

#include "byteps/net/link/nics.h"

namespace ps {

// The cores of each NUMA node that has any, by the node's number.
using NumaNodes = std::map<int, std::set<int>>;

// What the kernel says below `sysfs`; empty where it says nothing.
NumaNodes ReadNumaNodes(const std::string& sysfs = "/sys");
// The cores that this thread may use.
std::set<int> AllowedCores();

struct ThreadPlace {
  int numa = -1;        // -1: anywhere
  std::set<int> cores;  // of that node, those that this process may use
};

// Where each of `threads` threads runs that together serve `nics`.  A NUMA node gets threads in
// proportion to the rate of its NICs, and one at least.  All run anywhere where that cannot be: the
// host has one node, it is not known to which one a NIC is attached, there are fewer threads than
// such nodes, or the process may not use as many of a node's cores as it would have threads there.
std::vector<ThreadPlace> PlaceThreads(const std::vector<HostNic>& nics, const NumaNodes& nodes,
                                      const std::set<int>& allowed, int threads);

}  // namespace ps
#endif  // BYTEPS_NET_LINK_NUMA_H_
