// Vacancies: times in which a lost server has no successor yet, or the scheduler is missing. In
// these times no worker counts as late.
#ifndef BYTEPS_CLUSTER_VACANCIES_H_
#define BYTEPS_CLUSTER_VACANCIES_H_

#include <chrono>
#include <set>

#include "byteps/base/mutex.h"
#include "byteps/cluster/channel.h"

namespace byteps {
namespace core {

// Thread-safe.
class Vacancies {
 public:
  using Clock = std::chrono::steady_clock;

  // `channel` must outlive this.
  explicit Vacancies(const Channel* channel) : channel_(channel) {}

  // Records that the server of `rank` was lost, or was replaced.
  void Lost(int rank) {
    ps::MutexLock lock(&mu_);
    ranks_.insert(rank);
  }
  void Replaced(int rank) {
    ps::MutexLock lock(&mu_);
    if (ranks_.erase(rank) > 0) filled_ = Clock::now();
  }

  // Returns the last time at which a server or the scheduler was missing; `now` if one is missing
  // now.
  Clock::time_point Last(Clock::time_point now) const {
    if (channel_->lacks_scheduler()) return now;
    ps::MutexLock lock(&mu_);
    return ranks_.empty() ? filled_ : now;
  }

 private:
  const Channel* const channel_;
  mutable ps::Mutex mu_;
  std::set<int> ranks_ PS_GUARDED_BY(mu_);
  Clock::time_point filled_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_CLUSTER_VACANCIES_H_
