#include "byteps/net/link/counters.h"

#include <map>
#include <memory>

#include "byteps/base/mutex.h"
#include "byteps/net/link/nics.h"
#include "ps/base.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace {

Mutex endpoints_mu;
// The list is never destroyed, because threads may read it while the process ends.
auto* const endpoints PS_PT_GUARDED_BY(endpoints_mu) =
    new std::vector<std::shared_ptr<EndpointCounters>>();

std::string NameOf(int node_id) {
  if (node_id < 0 || node_id == Node::kEmpty) return "";
  if (node_id == kScheduler) return "scheduler";
  return (node_id % 2 ? "worker " : "server ") + std::to_string(Postoffice::IDtoRank(node_id));
}

}  // namespace

std::shared_ptr<EndpointCounters> NewEndpointCounters(const std::string& plane, int index) {
  auto counters = std::make_shared<EndpointCounters>(plane, index);
  MutexLock lock(&endpoints_mu);
  endpoints->push_back(counters);
  return counters;
}

void ForgetEndpointCounters() {
  MutexLock lock(&endpoints_mu);
  endpoints->clear();
}

std::vector<EndpointReading> ReadEndpointCounters() {
  MutexLock lock(&endpoints_mu);
  std::vector<EndpointReading> readings;
  for (const auto& e : *endpoints) {
    readings.push_back({NameOf(e->peer), e->plane, e->index, e->messages_sent, e->bytes_sent,
                        e->messages_received, e->bytes_received, e->values_in_place,
                        e->bytes_in_place, e->values_offered, e->values_in_pool, e->bytes_in_pool,
                        e->values_in_frames, e->bytes_in_frames, e->send_completions});
  }
  return readings;
}

namespace {

constexpr char kLoopback[] = "lo";
// Name for traffic from an address that no interface has, perhaps no longer.
constexpr char kUnknown[] = "unknown";

Mutex nics_mu;
// The map is never destroyed, because threads may count while the process ends.
auto* const by_name PS_PT_GUARDED_BY(nics_mu) =
    new std::map<std::string, std::unique_ptr<NicCounters>>;

NicCounters* CountersOf(const std::string& name) {
  MutexLock lock(&nics_mu);
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
  MutexLock lock(&nics_mu);
  std::vector<NicReading> readings;
  for (const auto& item : *by_name) {
    readings.push_back({item.first, item.second->bytes_sent, item.second->bytes_received});
  }
  return readings;
}

}  // namespace ps
