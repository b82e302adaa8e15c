#include "byteps/net/link/nics.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <bitset>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <system_error>

#include "byteps/base/invariant.h"
#include "byteps/net/link/net_address.h"

namespace ps {
namespace {

// NICs below 1/kSlowest of the fastest NIC's rate are not used, because they are for management.
constexpr int kSlowest = 2;
// Distances between PCIe devices of different root complexes, and of different NUMA nodes.
constexpr int kOtherRoot = 100;
constexpr int kOtherNuma = 200;

int ReadInt(const std::string& path, int fallback) {
  int value = fallback;
  std::ifstream(path) >> value;
  return value;
}

// Returns the PCIe devices in a path below /sys/devices.
std::string PlaceOf(const std::string& path) {
  char resolved[PATH_MAX];
  if (realpath(path.c_str(), resolved) == nullptr) return "";
  const std::string text = resolved;
  const size_t root = text.find("/pci");
  if (root == std::string::npos) return "";
  // The loop stops at the PCIe device: a virtio NIC lies below it.
  std::string device_path;
  std::istringstream parts(text.substr(root + 1));
  for (std::string part; std::getline(parts, part, '/');) {
    const bool is_pci = part.compare(0, 3, "pci") == 0 || part.find(':') != std::string::npos;
    if (!is_pci) break;
    device_path += (device_path.empty() ? "" : "/") + part;
  }
  return device_path;
}

std::vector<std::string> Split(const std::string& text, char between) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, between);) parts.push_back(part);
  return parts;
}

// Returns the distance between a NIC and a GPU: PCIe steps, kOtherRoot or kOtherNuma. 0 without a
// GPU.
int Distance(const HostNic& nic, const DevicePlace& gpu) {
  if (gpu.place.empty()) return 0;
  const auto a = Split(nic.place, '/'), b = Split(gpu.place, '/');
  size_t common = 0;
  while (common < a.size() && common < b.size() && a[common] == b[common]) ++common;
  if (common > 0) return static_cast<int>(a.size() + b.size() - 2 * common);
  const bool known = nic.numa >= 0 && gpu.numa >= 0;
  return known && nic.numa == gpu.numa ? kOtherRoot : kOtherNuma;
}

int PrefixOf(const sockaddr* mask) {
  if (mask == nullptr) return 0;
  size_t bits = 0;
  const auto count = [&bits](const void* bytes, size_t size) {
    for (size_t i = 0; i < size; ++i) {
      bits += std::bitset<8>(static_cast<const unsigned char*>(bytes)[i]).count();
    }
  };
  if (mask->sa_family == AF_INET) {
    count(&reinterpret_cast<const sockaddr_in*>(mask)->sin_addr, sizeof(in_addr));
  } else if (mask->sa_family == AF_INET6) {
    count(&reinterpret_cast<const sockaddr_in6*>(mask)->sin6_addr, sizeof(in6_addr));
  }
  return static_cast<int>(bits);
}

std::string TextOf(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address->sa_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, text,
              sizeof(text));
  } else if (address->sa_family == AF_INET6) {
    const in6_addr& v6 = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
    if (!IN6_IS_ADDR_LINKLOCAL(&v6)) inet_ntop(AF_INET6, &v6, text, sizeof(text));
  }
  return text;
}

using Interfaces = std::unique_ptr<ifaddrs, decltype(&freeifaddrs)>;

Interfaces ListInterfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) list = nullptr;
  return Interfaces(list, &freeifaddrs);
}

bool IsV6(const std::string& address) { return address.find(':') != std::string::npos; }

// Returns the RDMA device of an interface. A hardware device shares the interface's PCIe device; a
// software device names the interface that it runs on.
std::string RdmaDeviceOf(const std::string& name, const std::string& sysfs) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(
           sysfs + "/class/net/" + name + "/device/infiniband", error)) {
    return entry.path().filename();
  }
  for (const auto& entry :
       std::filesystem::directory_iterator(sysfs + "/class/infiniband", error)) {
    std::string below;
    std::ifstream(entry.path() / "parent") >> below;
    if (below == name) return entry.path().filename();
  }
  return "";
}

// Returns one address per interface, of the family of the node's own address.
std::vector<HostNic> OnePerInterface(const std::vector<HostNic>& there, const NicUser& user) {
  std::vector<HostNic> nics;
  for (const HostNic& candidate : there) {
    if (IsV6(candidate.nic.address) != IsV6(user.address)) continue;
    const auto same = std::find_if(nics.begin(), nics.end(), [&](const HostNic& other) {
      return other.name == candidate.name;
    });
    if (same == nics.end()) {
      nics.push_back(candidate);
    } else if (candidate.nic.address == user.address) {
      *same = candidate;
    }
  }
  return nics;
}

std::vector<HostNic> Named(const std::vector<HostNic>& nics, const std::string& setting) {
  std::vector<HostNic> named;
  for (const std::string& name : Split(setting, ',')) {
    const auto match = std::find_if(nics.begin(), nics.end(), [&](const HostNic& nic) {
      return nic.name == name || nic.rdma == name;
    });
    if (match == nics.end()) {
      std::string known;
      for (const HostNic& nic : nics) {
        known += (known.empty() ? "" : ", ") + nic.name;
        if (!nic.rdma.empty()) known += " (" + nic.rdma + ")";
      }
      throw Error("BYTEPS_NICS='" + setting + "': '" + name +
                  "' is no interface with an address of the job's family; there are: " + known);
    }
    named.push_back(*match);
  }
  return named;
}

// Returns the NICs to use, which have similar rates. NICs of unknown rate count only if no rate is
// known.
std::vector<HostNic> OfUse(const std::vector<HostNic>& nics, const HostNic& own, bool uses_rdma) {
  if (!own.is_device) return {own};  // a bond, a bridge or a veth: the administrator has chosen
  const auto serves = [uses_rdma](const HostNic& nic) {
    return nic.is_device && nic.is_up && !IsLoopback(nic.nic.address) &&
           (!uses_rdma || !nic.rdma.empty());
  };
  int fastest = 0;
  for (const HostNic& nic : nics) {
    if (serves(nic)) fastest = std::max(fastest, nic.nic.mbps);
  }
  std::vector<HostNic> of_use;
  for (const HostNic& nic : nics) {
    if (serves(nic) && nic.nic.mbps >= fastest / kSlowest) of_use.push_back(nic);
  }
  return of_use.empty() ? std::vector<HostNic>{own} : of_use;
}

// Returns this worker's share of the NICs: the nearest ones to its GPU. If several NICs are equally
// near, the workers of a host take different ones.
std::vector<HostNic> NearestOf(const std::vector<HostNic>& nics, const NicUser& user) {
  const size_t ranks = std::max(user.local_size, 1);
  const size_t share = std::max<size_t>(1, (nics.size() + ranks - 1) / ranks);
  std::vector<HostNic> order = nics;
  const size_t first = std::max(user.local_rank, 0) * share % nics.size();
  std::rotate(order.begin(), order.begin() + static_cast<ptrdiff_t>(first), order.end());
  std::stable_sort(order.begin(), order.end(), [&](const HostNic& a, const HostNic& b) {
    return Distance(a, user.gpu) < Distance(b, user.gpu);
  });
  order.resize(share);
  return order;
}

}  // namespace

HostNic ReadNic(const std::string& name, const std::string& sysfs) {
  const std::string folder = sysfs + "/class/net/" + name;
  HostNic nic;
  nic.name = name;
  nic.is_device = access((folder + "/device").c_str(), F_OK) == 0;
  // A virtual interface reports an invented rate, so only a device's rate is read. -1 or no number
  // means that the link is down.
  if (nic.is_device) nic.nic.mbps = std::max(ReadInt(folder + "/speed", 0), 0);
  nic.rdma = RdmaDeviceOf(name, sysfs);
  nic.is_up = ReadInt(folder + "/carrier", 0) == 1;
  nic.place = nic.is_device ? PlaceOf(folder + "/device") : "";
  nic.numa = ReadInt(folder + "/device/numa_node", -1);
  return nic;
}

DevicePlace ReadDevice(const std::string& bus_id, const std::string& sysfs) {
  if (bus_id.empty()) return {};
  const std::string folder = sysfs + "/bus/pci/devices/" + bus_id;
  return {PlaceOf(folder), ReadInt(folder + "/numa_node", -1)};
}

std::vector<HostNic> ListNics(const std::string& sysfs) {
  const Interfaces list = ListInterfaces();
  std::vector<HostNic> nics;
  for (const ifaddrs* i = list.get(); i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr) continue;
    const std::string address = TextOf(i->ifa_addr);
    if (address.empty()) continue;
    HostNic nic = ReadNic(i->ifa_name, sysfs);
    nic.nic.address = address;
    nic.nic.prefix = PrefixOf(i->ifa_netmask);
    nics.push_back(std::move(nic));
  }
  return nics;
}

std::string InterfaceOf(const std::string& address) {
  const Interfaces list = ListInterfaces();
  for (const ifaddrs* i = list.get(); i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr != nullptr && TextOf(i->ifa_addr) == address) return i->ifa_name;
  }
  return "";
}

ChosenNics ChooseNics(const std::vector<HostNic>& there, const NicUser& user) {
  const bool automatic = user.setting.empty() || user.setting == "auto";
  const std::vector<HostNic> nics = OnePerInterface(there, user);
  const auto own = std::find_if(nics.begin(), nics.end(), [&](const HostNic& nic) {
    return nic.nic.address == user.address;
  });
  if (automatic && (own == nics.end() || IsLoopback(user.address))) return {};
  std::vector<HostNic> of_host = !automatic      ? Named(nics, user.setting)
                                 : user.only_own ? std::vector<HostNic>{*own}
                                                 : OfUse(nics, *own, user.uses_rdma);
  of_host.resize(std::min(of_host.size(), kMostNics));
  ChosenNics chosen;
  const auto known = [](const HostNic& nic) { return nic.nic.mbps > 0; };
  if (std::all_of(of_host.begin(), of_host.end(), known)) {
    for (const HostNic& nic : of_host) chosen.host_mbps += nic.nic.mbps;
  }
  const bool shares = automatic && user.is_worker;
  for (const HostNic& nic : shares ? NearestOf(of_host, user) : of_host) {
    chosen.nics.push_back(nic.nic);
  }
  return chosen;
}

NicUser NicUserFor(const Node& self, const NicSettings& settings) {
  NicUser user;
  user.address = self.hostname;
  user.is_worker = self.role == Node::WORKER;
  user.setting = settings.names;
  user.uses_rdma = settings.uses_rdma;
  const bool names_one_nic =
      settings.names_address || (user.uses_rdma && settings.chooses_rdma_device);
  user.only_own = names_one_nic && user.setting == "auto";
  user.gpu = ReadDevice(settings.gpu, "/sys");
  user.local_rank = settings.local_rank;
  user.local_size = settings.local_size;
  return user;
}

int HostMbps(const Node& self, const NicSettings& settings) {
  NicUser user = NicUserFor(self, settings);
  user.only_own = user.only_own || self.nics.empty();
  return ChooseNics(ListNics(), user).host_mbps;
}

namespace {

// Parses a list of cores such as "0-15,32-47". The list is empty for memory without cores, such as
// a GPU's.
std::set<int> ParseCores(const std::string& text) {
  std::set<int> cores;
  std::istringstream ranges(text);
  for (std::string range; std::getline(ranges, range, ',');) {
    int first = 0, last = 0;
    const int numbers = sscanf(range.c_str(), "%d-%d", &first, &last);
    if (numbers < 1) continue;
    if (numbers == 1) last = first;
    for (int core = first; core <= last && core < CPU_SETSIZE; ++core) cores.insert(core);
  }
  return cores;
}

// A NUMA node with NICs, and the share of the threads that it gets.
struct Share {
  ThreadPlace place;
  double rate = 0;  // sum over the node's NICs
  size_t threads = 0;
};

// Returns nothing if threads cannot be placed.
std::vector<Share> SharesOf(const std::vector<HostNic>& nics, const NumaNodes& nodes,
                            const std::set<int>& allowed) {
  const bool rates =
      std::all_of(nics.begin(), nics.end(), [](const HostNic& nic) { return nic.nic.mbps > 0; });
  std::vector<Share> shares;
  for (const HostNic& nic : nics) {
    const auto node = nodes.find(nic.numa);
    if (node == nodes.end()) return {};
    auto share = std::find_if(shares.begin(), shares.end(),
                              [&](const Share& one) { return one.place.numa == nic.numa; });
    if (share == shares.end()) {
      share = shares.insert(shares.end(), Share());
      share->place.numa = nic.numa;
      std::set_intersection(node->second.begin(), node->second.end(), allowed.begin(),
                            allowed.end(),
                            std::inserter(share->place.cores, share->place.cores.end()));
    }
    share->rate += rates ? nic.nic.mbps : 1;
  }
  return shares;
}

}  // namespace

NumaNodes ReadNumaNodes(const std::string& sysfs) {
  const std::string folder = sysfs + "/devices/system/node";
  const std::unique_ptr<DIR, int (*)(DIR*)> list(opendir(folder.c_str()), &closedir);
  NumaNodes nodes;
  while (const dirent* entry = list ? readdir(list.get()) : nullptr) {
    int number = 0;
    char rest = 0;
    if (sscanf(entry->d_name, "node%d%c", &number, &rest) != 1) continue;
    std::string text;
    std::getline(std::ifstream(folder + "/" + entry->d_name + "/cpulist"), text);
    std::set<int> cores = ParseCores(text);
    if (!cores.empty()) nodes[number] = std::move(cores);
  }
  return nodes;
}

std::set<int> AllowedCores() {
  cpu_set_t allowed;
  std::set<int> cores;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &allowed)) cores.insert(core);
  }
  return cores;
}

bool RunOn(std::thread* thread, const std::set<int>& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  return pthread_setaffinity_np(thread->native_handle(), sizeof(set), &set) == 0;
}

std::vector<ThreadPlace> PlaceThreads(const std::vector<HostNic>& nics, const NumaNodes& nodes,
                                      const std::set<int>& allowed, int threads) {
  const std::vector<ThreadPlace> anywhere(threads);
  if (nodes.size() < 2) return anywhere;
  std::vector<Share> shares = SharesOf(nics, nodes, allowed);
  if (shares.empty() || static_cast<size_t>(threads) < shares.size()) return anywhere;
  std::vector<ThreadPlace> places;
  for (int i = 0; i < threads; ++i) {
    Share& next =
        *std::min_element(shares.begin(), shares.end(), [](const Share& a, const Share& b) {
          return static_cast<double>(a.threads) / a.rate < static_cast<double>(b.threads) / b.rate;
        });
    if (++next.threads > next.place.cores.size()) return anywhere;
    places.push_back(next.place);
  }
  return places;
}

}  // namespace ps
