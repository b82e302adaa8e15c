// NICs of this host, and the choice of those that a node uses.
//
// The scheduler and servers use all suitable NICs of the host. A worker uses the NICs nearest to
// its GPU: those below the same PCIe switch or, if there are none, those of the same NUMA node.
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
  std::string rdma;  // name of this interface's RDMA device; "": it has none
  Nic nic;
  bool is_up = false;
  bool is_device = false;  // whether the NIC is physical, or a virtual device of a hypervisor
  // PCIe path of the NIC from the root, "pci0000:15/0000:15:01.0/0000:16:00.0"; "": not on PCIe.
  std::string place;
  int numa = -1;  // NUMA node of the NIC; -1: unknown
};

// Location of a PCIe device, such as a GPU.
struct DevicePlace {
  std::string place;
  int numa = -1;
};

// Reads the interface `name` from `sysfs` ("/sys"). Does not set its address.
HostNic ReadNic(const std::string& name, const std::string& sysfs);
// Locates the PCIe device with this bus id, "0000:1b:00.0". Returns an empty place if there is no
// such device.
DevicePlace ReadDevice(const std::string& bus_id, const std::string& sysfs);
// Lists the interfaces of this host with an address that others can reach, one entry per address.
std::vector<HostNic> ListNics(const std::string& sysfs = "/sys");
// Returns the name of the interface with this address; "" if none has it.
std::string InterfaceOf(const std::string& address);

// A node for which NICs are chosen, and its settings.
struct NicUser {
  // BYTEPS_NICS: "auto", or names of interfaces or RDMA devices, separated by commas.
  std::string setting;
  std::string address;  // this node's address, as others know it
  bool is_worker = false;
  bool only_own = false;  // whether to use only the NIC of `address`
  bool uses_rdma = false;
  DevicePlace gpu;     // place of a worker's GPU; empty: it has no GPU
  int local_rank = 0;  // rank among the workers of this host
  int local_size = 1;
};

struct ChosenNics {
  std::vector<Nic> nics;  // NICs of this node; empty: no NIC of this host has its address
  int host_mbps = 0;      // rate of all NICs that the nodes of this host use; 0: unknown
};

// Chooses the NICs of a node from `there`, the NICs of this host. Throws Error if the setting names
// an interface that this host lacks.
ChosenNics ChooseNics(const std::vector<HostNic>& there, const NicUser& user);

// Returns the description of this process, which is the node `self`.
NicUser NicUserFor(const Node& self, const NicSettings& settings);
// Returns ChosenNics::host_mbps for this process, which is the node `self`. If the node announces
// no list of NICs (Node::nics), returns the rate of the NIC with the node's address.
int HostMbps(const Node& self, const NicSettings& settings);

// Cores by NUMA node. NUMA nodes without cores are left out.
using NumaNodes = std::map<int, std::set<int>>;

// Reads the NUMA nodes from `sysfs`. The result is empty if `sysfs` lists none.
NumaNodes ReadNumaNodes(const std::string& sysfs = "/sys");
// Returns the cores that the calling thread may use.
std::set<int> AllowedCores();
// Restricts the thread to these cores. Returns false if the kernel refuses.
bool RunOn(std::thread* thread, const std::set<int>& cores);

struct ThreadPlace {
  int numa = -1;        // -1: no NUMA node
  std::set<int> cores;  // cores of the node that this process may use
};

// Chooses a NUMA node for each of `threads` threads that together serve `nics`. A NUMA node gets
// threads in proportion to the rate of its NICs, at least one. No thread is bound to a NUMA node if
// the host has only one, if a NIC's NUMA node is unknown, if there are fewer threads than NUMA
// nodes with NICs, or if this process may use fewer cores of a NUMA node than threads would run
// there.
std::vector<ThreadPlace> PlaceThreads(const std::vector<HostNic>& nics, const NumaNodes& nodes,
                                      const std::set<int>& allowed, int threads);

}  // namespace ps

#endif  // BYTEPS_NET_LINK_NICS_H_
