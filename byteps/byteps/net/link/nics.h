// The NICs of this host, and which of them a node uses.
//
// The scheduler and servers use all of the host's NICs that are of use, and each worker those
// nearest to its GPU: PCIe devices below the same switch first, then those of the same NUMA node.
#ifndef BYTEPS_NET_LINK_NICS_H_
#define BYTEPS_NET_LINK_NICS_H_

#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "byteps/net/link/nic_settings.h"
#include "ps/internal/message.h"

namespace ps {

// At most this many NICs of a node are used.
constexpr size_t kMostNics = 32;

// A network interface with an address.
struct HostNic {
  std::string name;
  std::string rdma;  // the RDMA device that it is the network interface of; empty: none
  Nic nic;
  bool is_up = false;
  bool is_device = false;  // hardware, or what a hypervisor gives instead
  // Its PCIe devices from the root, "pci0000:15/0000:15:01.0/0000:16:00.0"; empty: not on PCIe.
  std::string place;
  int numa = -1;  // -1: not known
};

// A PCIe device's place, such as a GPU's.
struct DevicePlace {
  std::string place;
  int numa = -1;
};

// What the kernel says below `sysfs` ("/sys") of the interface `name`, without its address.
HostNic ReadNic(const std::string& name, const std::string& sysfs);
// Of the PCIe device "0000:1b:00.0"; empty where there is none.
DevicePlace ReadDevice(const std::string& bus_id, const std::string& sysfs);
// All interfaces of this host that have an address others can reach, one entry per address.
std::vector<HostNic> ListNics(const std::string& sysfs = "/sys");
// The name of the interface that has this address; empty: none.
std::string InterfaceOf(const std::string& address);

// What NICs are chosen for.
struct NicUser {
  // BYTEPS_NICS: "auto", or names of interfaces or RDMA devices with commas between.
  std::string setting;
  std::string address;  // of this node, by which others know it
  bool is_worker = false;
  bool only_own = false;  // the NIC of its address alone, whatever others there are
  bool uses_rdma = false;
  DevicePlace gpu;     // of a worker; empty: it has none
  int local_rank = 0;  // among the workers of this host
  int local_size = 1;
};

struct ChosenNics {
  std::vector<Nic> nics;  // that this node uses; empty: its address is of no NIC of this host
  int host_mbps = 0;      // of all that the nodes of this host use; 0: not known
};

// Throws Error where the setting names no interface of this host.
ChosenNics ChooseNics(const std::vector<HostNic>& there, const NicUser& user);

// This process, as the node `self`.
NicUser NicUserFor(const Node& self, const NicSettings& settings);
// ChosenNics::host_mbps of this process; of a node that uses no list of NICs (Node::nics), the rate
// of the one that has its address.
int HostMbps(const Node& self, const NicSettings& settings);

// On which NUMA node the threads of a NIC run.

// The cores of each NUMA node that has any, by the node's number.
using NumaNodes = std::map<int, std::set<int>>;

// What the kernel says below `sysfs`; empty where it says nothing.
NumaNodes ReadNumaNodes(const std::string& sysfs = "/sys");
// The cores that this thread may use.
std::set<int> AllowedCores();
// From now on the thread runs on these.  False: it may not.
bool RunOn(std::thread* thread, const std::set<int>& cores);

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

#endif  // BYTEPS_NET_LINK_NICS_H_
