#include "byteps/observe/lateness.h"

#include <algorithm>

#include "byteps/observe/status_record.h"

namespace byteps {
namespace core {

void Lateness::Add(int rank, int64_t wait_ns) {
  ps::MutexLock lock(&mu_);
  ++sums_;
  LateWorker& worker = workers_[static_cast<uint32_t>(rank)];
  worker.rank = static_cast<uint32_t>(rank);
  ++worker.sums;
  worker.wait_ns += static_cast<uint64_t>(std::max<int64_t>(wait_ns, 0));
}

void Lateness::Take(uint64_t* sums, std::vector<LateWorker>* worst) {
  std::unordered_map<uint32_t, LateWorker> workers;
  {
    ps::MutexLock lock(&mu_);
    *sums = sums_;
    sums_ = 0;
    workers.swap(workers_);
  }
  worst->clear();
  for (const auto& entry : workers) worst->push_back(entry.second);
  std::sort(worst->begin(), worst->end(), [](const LateWorker& a, const LateWorker& b) {
    return a.wait_ns != b.wait_ns ? a.wait_ns > b.wait_ns : a.rank < b.rank;
  });
  if (worst->size() > StatusRecord::kMaxLate) worst->resize(StatusRecord::kMaxLate);
}

}  // namespace core
}  // namespace byteps
