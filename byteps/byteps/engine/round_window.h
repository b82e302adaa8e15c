// Flow control of one tensor: pushes of a worker that is too far ahead wait here.
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

// Lets so many rounds of a tensor be pushed as servers keep of it; later ones wait until an earlier
// one has ended, well or not.  They hold no thread, no window of a server and no pinned memory
// meanwhile.  The oldest round that has not ended at any member is within the window of each
// member, so some round can always go on.
//
// Any thread may call anything.
class RoundWindow {
 public:
  using Push = std::function<void()>;

  // `oldest`: of the rounds that have not ended; outlives this.
  explicit RoundWindow(const std::atomic<uint32_t>* oldest) : oldest_(oldest) {}

  // To be called before the first push.
  void SetSize(uint32_t rounds) { size_ = rounds; }

  // Whether a round may be pushed now.
  bool Admits(uint32_t round) const {
    // One that has failed may be older than all that have not ended.
    return static_cast<int32_t>(round - *oldest_) < static_cast<int32_t>(size_);
  }

  // Calls `push`: now, or in Advance once the round may be pushed.
  void PushOrHold(uint32_t round, Push push) {
    if (!Admits(round) && Hold(round, &push)) return PS_PROBE(kRoundHeld);
    push();
  }

  // *oldest has grown.
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
  std::multimap<uint32_t, Push> held_ PS_GUARDED_BY(mu_);  // by round, then first come
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_ENGINE_ROUND_WINDOW_H_
