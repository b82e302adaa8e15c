// For which workers the others waited.
#ifndef BYTEPS_OBSERVE_LATENESS_H_
#define BYTEPS_OBSERVE_LATENESS_H_

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "byteps/observe/status_record.h"

namespace byteps {
namespace core {

// Any thread.
class Lateness {
 public:
  // A sum is complete; the worker of `rank` pushed last, `wait_ns` after the first.
  void Add(int rank, int64_t wait_ns);

  // What was added since the last call: how many sums, and those for whom the others waited
  // longest, at most StatusRecord::kMaxLate.
  void Take(uint64_t* sums, std::vector<LateWorker>* worst);

 private:
  std::mutex mu_;
  // Guarded by mu_.
  uint64_t sums_ = 0;
  std::unordered_map<uint32_t, LateWorker> workers_;  // by rank
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_OBSERVE_LATENESS_H_
