// A queue whose readers sleep until there is something to read.
#ifndef BYTEPS_BASE_BLOCKING_QUEUE_H_
#define BYTEPS_BASE_BLOCKING_QUEUE_H_

#include <chrono>
#include <cstddef>
#include <deque>
#include <utility>

#include "byteps/base/mutex.h"

namespace byteps {
namespace core {

// Any number of threads may push and pop.  Close() lets readers take what is
// left and then makes every pop return false at once.
template <typename T>
class BlockingQueue {
 public:
  void Push(T item) {
    {
      ps::MutexLock lock(&mu_);
      items_.push_back(std::move(item));
    }
    cond_.NotifyOne();
  }

  // Blocks until an item is there (true) or the queue is closed and empty (false).
  bool Pop(T* item) {
    ps::MutexLock lock(&mu_);
    cond_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return closed_ || !items_.empty(); });
    return Take(item);
  }

  // As Pop, but gives up after `timeout`; *timed_out tells the two falses apart.
  template <typename Rep, typename Period>
  bool PopFor(T* item, std::chrono::duration<Rep, Period> timeout, bool* timed_out) {
    ps::MutexLock lock(&mu_);
    *timed_out = !cond_.WaitFor(&mu_, timeout,
                                [this]() PS_REQUIRES(mu_) { return closed_ || !items_.empty(); });
    return Take(item);
  }

  size_t Size() {
    ps::MutexLock lock(&mu_);
    return items_.size();
  }

  void Close() {
    {
      ps::MutexLock lock(&mu_);
      closed_ = true;
    }
    cond_.NotifyAll();
  }

 private:
  bool Take(T* item) PS_REQUIRES(mu_) {
    if (items_.empty()) return false;
    *item = std::move(items_.front());
    items_.pop_front();
    return true;
  }

  ps::Mutex mu_;
  ps::CondVar cond_;
  std::deque<T> items_ PS_GUARDED_BY(mu_);
  bool closed_ PS_GUARDED_BY(mu_) = false;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_BASE_BLOCKING_QUEUE_H_
