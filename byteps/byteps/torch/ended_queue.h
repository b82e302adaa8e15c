// Operations that have ended, for the one thread that completes futures in Python.
#ifndef BYTEPS_TORCH_ENDED_QUEUE_H_
#define BYTEPS_TORCH_ENDED_QUEUE_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "byteps/base/mutex.h"

namespace byteps {
namespace core {

// Any thread may call anything.  The engine's threads push and never wait for Python.
class EndedQueue {
 public:
  void Push(int64_t handle) {
    {
      ps::MutexLock lock(&mu_);
      ended_.push_back(handle);
    }
    cond_.NotifyAll();
  }

  // Handles in the order in which their operations ended.  Blocks until there is one; empty: Wake
  // was called, and there is none.
  std::vector<int64_t> Await() {
    ps::MutexLock lock(&mu_);
    cond_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return woken_ || !ended_.empty(); });
    if (ended_.empty()) woken_ = false;
    return std::exchange(ended_, {});
  }

  void Wake() {
    {
      ps::MutexLock lock(&mu_);
      woken_ = true;
    }
    cond_.NotifyAll();
  }

 private:
  ps::Mutex mu_;
  ps::CondVar cond_;
  std::vector<int64_t> ended_ PS_GUARDED_BY(mu_);
  bool woken_ PS_GUARDED_BY(mu_) = false;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_TORCH_ENDED_QUEUE_H_
