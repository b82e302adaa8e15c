#include "byteps/net/link/nic_counters.h"

#include <map>
#include <memory>

#include "byteps/base/mutex.h"
#include "byteps/net/link/nics.h"

namespace ps {
namespace {

constexpr char kLoopback[] = "lo";
// An address that no interface has any more, or one that the kernel accepts without an interface.
constexpr char kUnknown[] = "unknown";

Mutex mu;
// Never destroyed: threads may count while the process ends.
auto* const by_name PS_PT_GUARDED_BY(mu) = new std::map<std::string, std::unique_ptr<NicCounters>>;

NicCounters* CountersOf(const std::string& name) {
  MutexLock lock(&mu);
  std::unique_ptr<NicCounters>& counters = (*by_name)[name];
  if (!counters) counters = std::make_unique<NicCounters>(name);
  return counters.get();
}

}  // namespace

NicCounters* CountersOfNic(const std::string& here, const std::string& there) {
  return here == there ? CountersOf(kLoopback) : CountersOfNic(here);
}

NicCounters* CountersOfNic(const std::string& here) {
  const std::string name = InterfaceOf(here);
  return CountersOf(name.empty() ? kUnknown : name);
}

std::vector<NicReading> ReadNicCounters() {
  MutexLock lock(&mu);
  std::vector<NicReading> readings;
  for (const auto& item : *by_name) {
    readings.push_back({item.first, item.second->bytes_sent, item.second->bytes_received});
  }
  return readings;
}

}  // namespace ps
