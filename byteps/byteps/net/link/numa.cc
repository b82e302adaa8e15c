#include "byteps/net/link/numa.h"

#include <dirent.h>
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>

namespace ps {
namespace {

// "0-15,32-47"; empty of memory without cores, such as a GPU's.
std::set<int> ParseCores(const std::string& text) {
  std::set<int> cores;
  std::istringstream ranges(text);
  for (std::string range; std::getline(ranges, range, ',');) {
    int first = 0, last = 0;
    const int found = sscanf(range.c_str(), "%d-%d", &first, &last);
    if (found < 1) continue;
    if (found == 1) last = first;
    for (int core = first; core <= last && core < CPU_SETSIZE; ++core) cores.insert(core);
  }
  return cores;
}

// A node that NICs are attached to.
struct Share {
  ThreadPlace place;
  double rate = 0;  // of its NICs
  size_t threads = 0;
};

// Empty: threads cannot be placed.
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
