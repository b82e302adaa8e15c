#include "byteps/net/link/endpoint_counters.h"

#include "byteps/base/mutex.h"
#include "ps/base.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace {

Mutex mu;
// Never destroyed: threads may read it while the process ends.
auto* const endpoints PS_PT_GUARDED_BY(mu) = new std::vector<std::shared_ptr<EndpointCounters>>();

std::string NameOf(int node_id) {
  if (node_id < 0 || node_id == Node::kEmpty) return "";
  if (node_id == kScheduler) return "scheduler";
  return (node_id % 2 ? "worker " : "server ") + std::to_string(Postoffice::IDtoRank(node_id));
}

}  // namespace

std::shared_ptr<EndpointCounters> NewEndpointCounters(const std::string& plane, int index) {
  auto counters = std::make_shared<EndpointCounters>(plane, index);
  MutexLock lock(&mu);
  endpoints->push_back(counters);
  return counters;
}

void ForgetEndpointCounters() {
  MutexLock lock(&mu);
  endpoints->clear();
}

std::vector<EndpointReading> ReadEndpointCounters() {
  MutexLock lock(&mu);
  std::vector<EndpointReading> readings;
  for (const auto& e : *endpoints) {
    readings.push_back({NameOf(e->peer), e->plane, e->index, e->messages_sent, e->bytes_sent,
                        e->messages_received, e->bytes_received, e->values_in_place,
                        e->bytes_in_place, e->values_in_pool, e->bytes_in_pool, e->values_in_frames,
                        e->bytes_in_frames, e->send_completions});
  }
  return readings;
}

}  // namespace ps
