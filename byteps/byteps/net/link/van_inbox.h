// What a van's receiving thread has to do, from threads that hear of it.
#ifndef BYTEPS_NET_LINK_VAN_INBOX_H_
#define BYTEPS_NET_LINK_VAN_INBOX_H_

#include <deque>
#include <utility>

#include "byteps/base/mutex.h"

namespace ps {

// Of messages and news of lost peers.  It also knows whether the van may be used: not before Open,
// and not after End or Close.
template <typename Event>
class VanInbox {
 public:
  void Open() {
    MutexLock lock(&mu_);
    closed_ = ended_ = false;
  }

  bool is_open() {
    MutexLock lock(&mu_);
    return !closed_;
  }

  // False once closed.  Otherwise Close waits for EndUse.
  bool BeginUse() {
    MutexLock lock(&mu_);
    if (closed_) return false;
    ++users_;
    return true;
  }
  void EndUse() {
    MutexLock lock(&mu_);
    // Else it would wake the thread that waits for events, with each message that is sent.
    if (--users_ == 0 && closed_) cond_.NotifyAll();
  }

  void Put(Event event) {
    {
      MutexLock lock(&mu_);
      events_.push_back(std::move(event));
    }
    cond_.NotifyAll();
  }

  // Waits for an event.  False once ended: those that are left are not taken.
  bool Take(Event* event) {
    MutexLock lock(&mu_);
    cond_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return ended_ || !events_.empty(); });
    if (ended_) return false;
    *event = std::move(events_.front());
    events_.pop_front();
    return true;
  }

  // Has Take return; closes.
  void End() {
    MutexLock lock(&mu_);
    closed_ = ended_ = true;
    cond_.NotifyAll();
  }

  // Returns when nobody uses the van any more.
  void Close() {
    MutexLock lock(&mu_);
    closed_ = true;  // also when it never was open
    cond_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return users_ == 0; });
  }

  void Clear() {
    MutexLock lock(&mu_);
    events_.clear();
  }

 private:
  Mutex mu_;
  CondVar cond_;
  std::deque<Event> events_ PS_GUARDED_BY(mu_);
  bool closed_ PS_GUARDED_BY(mu_) = true;
  bool ended_ PS_GUARDED_BY(mu_) = false;
  int users_ PS_GUARDED_BY(mu_) = 0;
};

}  // namespace ps
#endif  // BYTEPS_NET_LINK_VAN_INBOX_H_
