#ifndef BYTEPS_ENGINE_MISSING_RANKS_H_
#define BYTEPS_ENGINE_MISSING_RANKS_H_

#include <set>
#include <vector>

#include "byteps/base/mutex.h"

namespace byteps {
namespace core {

// Ranks whose values sums of this worker have lacked, since their replicas were removed.
//
// Any thread may call anything.
class MissingRanks {
 public:
  void Add(int rank) {
    ps::MutexLock lock(&mu_);
    ranks_.insert(rank);
  }

  // Those that were added since this was called last, ascending.
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
