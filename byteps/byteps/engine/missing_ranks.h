#ifndef BYTEPS_ENGINE_MISSING_RANKS_H_
#define BYTEPS_ENGINE_MISSING_RANKS_H_

#include <set>
#include <vector>

#include "byteps/base/mutex.h"

namespace byteps {
namespace core {

// Ranks whose values were missing in sums of this worker, because their replicas were removed.
// Thread-safe.
class MissingRanks {
 public:
  void Add(int rank) {
    ps::MutexLock lock(&mu_);
    ranks_.insert(rank);
  }

  // Returns the ranks that were added since the last call, ascending.
  std::vector<int> Take() {
    ps::MutexLock lock(&mu_);
    std::vector<int> ranks(ranks_.begin(), ranks_.end());
    ranks_.clear();
    return ranks;
  }

 private:
  ps::Mutex mu_;
  std::set<int> ranks_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_MISSING_RANKS_H_
