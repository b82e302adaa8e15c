#ifndef BYTEPS_OBSERVE_LATENESS_H_
#define BYTEPS_OBSERVE_LATENESS_H_

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/observe/status_record.h"

namespace byteps {
namespace core {

// Records for which workers the others have waited. Thread-safe.
class Lateness {
 public:
  // Records a complete sum. The worker of `rank` pushed last, `wait_ns` after the first.
  void Add(int rank, int64_t wait_ns);

  // Returns the records since the last call: the number of sums, and at most StatusRecord::kMaxLate
  // workers, those that caused the longest waits.
  void Take(uint64_t* sums, std::vector<LateWorker>* worst);

 private:
  ps::Mutex mu_;
  uint64_t sums_ PS_GUARDED_BY(mu_) = 0;
  std::unordered_map<uint32_t, LateWorker> workers_ PS_GUARDED_BY(mu_);  // by rank
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_OBSERVE_LATENESS_H_
