// Flow control of one tensor: holds back pushes of a worker that is too many rounds ahead.
#ifndef BYTEPS_ENGINE_ROUND_WINDOW_H_
#define BYTEPS_ENGINE_ROUND_WINDOW_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/mutex.h"

namespace byteps {
namespace core {

// Admits as many rounds of a tensor as servers keep open. Later rounds wait until an earlier one
// has ended, with success or not. A waiting round occupies no thread, no server window and no
// pinned memory. Members cannot deadlock, because the oldest round that any member has open is
// within the window of every member.
//
// Thread-safe.
class RoundWindow {
 public:
  using Push = std::function<void()>;

  // `oldest`: the oldest round that has not ended. The variable outlives this.
  explicit RoundWindow(const std::atomic<uint32_t>* oldest) : oldest_(oldest) {}

  // Sets the number of rounds that servers keep open. Call before the first push.
  void SetSize(uint32_t rounds) { size_ = rounds; }

  // Returns whether a round may be pushed now.
  bool Admits(uint32_t round) const {
    // The difference is signed, because a round that failed may be older than every round in
    // flight.
    return static_cast<int32_t>(round - *oldest_) < static_cast<int32_t>(size_);
  }

  // Calls `push` now, or from Advance once the round is admitted.
  void PushOrHold(uint32_t round, Push push) {
    if (!Admits(round) && Hold(round, &push)) return PS_PROBE(kRoundHeld);
    push();
  }

  // Pushes rounds that are admitted now. Call when *oldest has grown.
  void Advance() {
    std::vector<Push> admitted;
    {
      ps::MutexLock lock(&mu_);
      while (!held_.empty() && Admits(held_.begin()->first)) {
        admitted.push_back(std::move(held_.begin()->second));
        held_.erase(held_.begin());
      }
    }
    for (const Push& push : admitted) push();
  }

 private:
  bool Hold(uint32_t round, Push* push) {
    ps::MutexLock lock(&mu_);
    if (Admits(round)) return false;
    held_.emplace(round, std::move(*push));
    return true;
  }

  const std::atomic<uint32_t>* const oldest_;
  uint32_t size_ = INT32_MAX;
  ps::Mutex mu_;
  std::multimap<uint32_t, Push> held_ PS_GUARDED_BY(mu_);  // by round, then in order of arrival
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_ENGINE_ROUND_WINDOW_H_
