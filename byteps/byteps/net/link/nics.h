// The NICs of this host, and the choice of those that a node uses.
//
// The scheduler and servers use all suitable NICs of the host. A worker uses those nearest to its
// GPU: PCIe devices below the same switch first, then those of the same NUMA node.
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

// Limit of NICs per node.
constexpr size_t kMostNics = 32;

// A network interface and one of its addresses.
struct HostNic {
  std::string name;
  std::string rdma;  // RDMA device of this interface; "": none
  Nic nic;
  bool is_up = false;
  bool is_device = false;  // a physical NIC, or a hypervisor's
  // Its PCIe path from the root, "pci0000:15/0000:15:01.0/0000:16:00.0"; "": not on PCIe.
  std::string place;
  int numa = -1;  // -1: unknown
};

// Location of a PCIe device, such as a GPU.
struct DevicePlace {
  std::string place;
  int numa = -1;
};

// Reads the interface `name` from `sysfs` ("/sys"). Does not set its address.
HostNic ReadNic(const std::string& name, const std::string& sysfs);
// Locates the PCIe device "0000:1b:00.0"; empty if there is none.
DevicePlace ReadDevice(const std::string& bus_id, const std::string& sysfs);
// Lists the interfaces of this host with an address that others can reach, one entry per address.
std::vector<HostNic> ListNics(const std::string& sysfs = "/sys");
// Returns the name of the interface with this address; "" if none has it.
std::string InterfaceOf(const std::string& address);

// Node for which NICs are chosen, and its settings.
struct NicUser {
  // BYTEPS_NICS: "auto", or names of interfaces or RDMA devices, separated by commas.
  std::string setting;
  std::string address;  // this node's address, as others know it
  bool is_worker = false;
  bool only_own = false;  // use the NIC of `address` alone
  bool uses_rdma = false;
  DevicePlace gpu;     // a worker's; empty: it has none
  int local_rank = 0;  // rank among the workers of this host
  int local_size = 1;
};

struct ChosenNics {
  std::vector<Nic> nics;  // NICs of this node; empty: no NIC of this host has its address
  int host_mbps = 0;      // rate of all NICs that the nodes of this host use; 0: unknown
};

// Throws Error if the setting names an interface that this host lacks.
ChosenNics ChooseNics(const std::vector<HostNic>& there, const NicUser& user);

// Describes this process, which is the node `self`.
NicUser NicUserFor(const Node& self, const NicSettings& settings);
// Returns ChosenNics::host_mbps for this process. If the node announces no list of NICs
// (Node::nics): the rate of the NIC with its address.
int HostMbps(const Node& self, const NicSettings& settings);

// Cores by NUMA node. Nodes without cores are missing.
using NumaNodes = std::map<int, std::set<int>>;

// Reads the NUMA nodes from `sysfs`; empty if it lists none.
NumaNodes ReadNumaNodes(const std::string& sysfs = "/sys");
// Returns the cores that the calling thread may use.
std::set<int> AllowedCores();
// Restricts the thread to these cores. Returns false if the kernel refuses.
bool RunOn(std::thread* thread, const std::set<int>& cores);

struct ThreadPlace {
  int numa = -1;        // -1: no NUMA node
  std::set<int> cores;  // cores of the node that this process may use
};

// Chooses a NUMA node for each of `threads` threads that together serve `nics`. A node gets threads
// in proportion to the rate of its NICs, at least one. No thread is bound if the host has one node,
// a NIC's node is unknown, there are fewer threads than nodes with NICs, or the process may use
// fewer cores of a node than threads would run there.
std::vector<ThreadPlace> PlaceThreads(const std::vector<HostNic>& nics, const NumaNodes& nodes,
                                      const std::set<int>& allowed, int threads);

}  // namespace ps

#endif  // BYTEPS_NET_LINK_NICS_H_
