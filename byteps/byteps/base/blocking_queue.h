// A queue whose readers sleep until there is something to read.
#ifndef BYTEPS_BASE_BLOCKING_QUEUE_H_
#define BYTEPS_BASE_BLOCKING_QUEUE_H_

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <utility>

namespace byteps {
namespace core {

// Any number of threads may push and pop.  Close() lets readers take what is
// left and then makes every pop return false at once.
template <typename T>
class BlockingQueue {
 public:
  void Push(T item) {
    {
      std::lock_guard<std::mutex> lock(mu_);
      items_.push_back(std::move(item));
    }
    cond_.notify_one();
  }

  // Blocks until an item is there (true) or the queue is closed and empty (false).
  bool Pop(T* item) {
    std::unique_lock<std::mutex> lock(mu_);
    cond_.wait(lock, [this] { return closed_ || !items_.empty(); });
    return Take(item);
  }

  // As Pop, but gives up after `timeout`; *timed_out tells the two falses apart.
  template <typename Rep, typename Period>
  bool PopFor(T* item, std::chrono::duration<Rep, Period> timeout, bool* timed_out) {
    std::unique_lock<std::mutex> lock(mu_);
    *timed_out = !cond_.wait_for(lock, timeout, [this] { return closed_ || !items_.empty(); });
    return Take(item);
  }

  size_t Size() {
    std::lock_guard<std::mutex> lock(mu_);
    return items_.size();
  }

  void Close() {
    {
      std::lock_guard<std::mutex> lock(mu_);
      closed_ = true;
    }
    cond_.notify_all();
  }

 private:
  bool Take(T* item) {
    if (items_.empty()) return false;
    *item = std::move(items_.front());
    items_.pop_front();
    return true;
  }

  std::mutex mu_;
  std::condition_variable cond_;
  std::deque<T> items_;
  bool closed_ = false;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_BASE_BLOCKING_QUEUE_H_
