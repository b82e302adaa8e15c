#include "byteps/base/memory_reserve.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <vector>

namespace byteps {
namespace core {
namespace {

// A memory limit: its name, and the free bytes below it.
struct Limit {
  const char* name;
  uint64_t bytes;
  uint64_t free;
};

// Reads the number at a file's start. Returns `otherwise` if there is none, e.g. for "max".
uint64_t ReadNumber(const char* path, uint64_t otherwise) {
  std::ifstream in(path);
  uint64_t value;
  return in >> value ? value : otherwise;
}

Limit OfMachine() {
  Limit limit{"MemAvailable of this host", UINT64_MAX, UINT64_MAX};
  std::ifstream in("/proc/meminfo");
  std::string name, unit;
  uint64_t kibibytes;
  while (in >> name >> kibibytes) {
    if (name == "MemTotal:") limit.bytes = kibibytes << 10;
    if (name == "MemAvailable:") limit.free = kibibytes << 10;
    std::getline(in, unit);
  }
  return limit;
}

Limit Of(const char* name, uint64_t bytes, uint64_t used) {
  return {name, bytes, bytes == UINT64_MAX ? UINT64_MAX : bytes - std::min(bytes, used)};
}

// Reads the limit of this process's control group (version 2 or 1), as a container sees it.
Limit OfGroup(const char* name, const char* limit_file, const char* used_file) {
  return Of(name, ReadNumber(limit_file, UINT64_MAX), ReadNumber(used_file, 0));
}

Limit OfAddresses() {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return {"", UINT64_MAX, UINT64_MAX};
  }
  return Of("ulimit -v", limit.rlim_cur, ReadNumber("/proc/self/statm", 0) * sysconf(_SC_PAGESIZE));
}

Limit Tightest() {
  const std::vector<Limit> limits = {
      OfMachine(),
      OfGroup("memory.max of the control group", "/sys/fs/cgroup/memory.max",
              "/sys/fs/cgroup/memory.current"),
      OfGroup("memory.limit_in_bytes of the control group",
              "/sys/fs/cgroup/memory/memory.limit_in_bytes",
              "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
      OfAddresses(),
  };
  return *std::min_element(limits.begin(), limits.end(),
                           [](const Limit& a, const Limit& b) { return a.free < b.free; });
}

}  // namespace

std::string DescribeFreeMemory() {
  const Limit limit = Tightest();
  return std::to_string(limit.free) + " of " + std::to_string(limit.bytes) + " bytes are free (" +
         limit.name + ")";
}

uint64_t AvailableMemory() { return Tightest().free; }

}  // namespace core
}  // namespace byteps
