// Locks that clang checks: which lock guards what, and who must hold it, is part of the code.
//
//   class Counter {
//    public:
//     void Add() {
//       MutexLock lock(&mu_);
//       ++count_;
//       cond_.NotifyAll();
//     }
//     void AwaitSome() {
//       MutexLock lock(&mu_);
//       cond_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return count_ > 0; });
//     }
//
//    private:
//     Mutex mu_;
//     CondVar cond_;
//     int count_ PS_GUARDED_BY(mu_) = 0;
//   };
//
// Code that touches count_ without mu_ gets an error from clang's -Wthread-safety.  gcc ignores the
// annotations.  All of it is std::mutex, std::shared_mutex and std::condition_variable.
#ifndef BYTEPS_BASE_MUTEX_H_
#define BYTEPS_BASE_MUTEX_H_

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <shared_mutex>
#include <utility>

#if defined(__clang__)
#define PS_THREAD_SAFETY(x) __attribute__((x))
#else
#define PS_THREAD_SAFETY(x)
#endif

// On a member: it is read and written under this lock; with PT, what it points to is.
#define PS_GUARDED_BY(mu) PS_THREAD_SAFETY(guarded_by(mu))
#define PS_PT_GUARDED_BY(mu) PS_THREAD_SAFETY(pt_guarded_by(mu))
// On a function or a lambda: the caller holds these locks (shared: or reads under them).
#define PS_REQUIRES(...) PS_THREAD_SAFETY(requires_capability(__VA_ARGS__))
#define PS_REQUIRES_SHARED(...) PS_THREAD_SAFETY(requires_shared_capability(__VA_ARGS__))
// On a function: the caller does not hold them, since the function takes them.
#define PS_EXCLUDES(...) PS_THREAD_SAFETY(locks_excluded(__VA_ARGS__))
// On a lock: where both are held, it is taken after these.
#define PS_ACQUIRED_AFTER(...) PS_THREAD_SAFETY(acquired_after(__VA_ARGS__))
// On a function that clang cannot follow.  Say why.
#define PS_NO_THREAD_SAFETY_ANALYSIS PS_THREAD_SAFETY(no_thread_safety_analysis)

namespace ps {

class PS_THREAD_SAFETY(capability("mutex")) Mutex {
 public:
  void Lock() PS_THREAD_SAFETY(acquire_capability()) { mu_.lock(); }
  void Unlock() PS_THREAD_SAFETY(release_capability()) { mu_.unlock(); }
  // Whether it was free, and is held now.
  bool TryLock() PS_THREAD_SAFETY(try_acquire_capability(true)) { return mu_.try_lock(); }

 private:
  friend class CondVar;
  std::mutex mu_;
};

// Holds a lock for as long as it lives, but between Unlock and Lock.
class PS_THREAD_SAFETY(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex* mu) PS_THREAD_SAFETY(acquire_capability(mu)) : mu_(mu) { mu_->Lock(); }
  ~MutexLock() PS_THREAD_SAFETY(release_capability()) {
    if (held_) mu_->Unlock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void Unlock() PS_THREAD_SAFETY(release_capability()) {
    held_ = false;
    mu_->Unlock();
  }
  void Lock() PS_THREAD_SAFETY(acquire_capability()) {
    mu_->Lock();
    held_ = true;
  }

 private:
  Mutex* const mu_;
  bool held_ = true;
};

// Many may read under it, or one may write.
class PS_THREAD_SAFETY(capability("mutex")) SharedMutex {
 public:
  void Lock() PS_THREAD_SAFETY(acquire_capability()) { mu_.lock(); }
  void Unlock() PS_THREAD_SAFETY(release_capability()) { mu_.unlock(); }
  void LockShared() PS_THREAD_SAFETY(acquire_shared_capability()) { mu_.lock_shared(); }
  void UnlockShared() PS_THREAD_SAFETY(release_shared_capability()) { mu_.unlock_shared(); }

 private:
  std::shared_mutex mu_;
};

class PS_THREAD_SAFETY(scoped_lockable) WriterLock {
 public:
  explicit WriterLock(SharedMutex* mu) PS_THREAD_SAFETY(acquire_capability(mu)) : mu_(mu) {
    mu_->Lock();
  }
  ~WriterLock() PS_THREAD_SAFETY(release_capability()) { mu_->Unlock(); }
  WriterLock(const WriterLock&) = delete;
  WriterLock& operator=(const WriterLock&) = delete;

 private:
  SharedMutex* const mu_;
};

class PS_THREAD_SAFETY(scoped_lockable) ReaderLock {
 public:
  explicit ReaderLock(SharedMutex* mu) PS_THREAD_SAFETY(acquire_shared_capability(mu)) : mu_(mu) {
    mu_->LockShared();
  }
  ~ReaderLock() PS_THREAD_SAFETY(release_capability()) { mu_->UnlockShared(); }
  ReaderLock(const ReaderLock&) = delete;
  ReaderLock& operator=(const ReaderLock&) = delete;

 private:
  SharedMutex* const mu_;
};

// Waits with a lock that the caller holds, which is given up meanwhile.  Predicates are called
// with the lock held.  Those that take a time return what the predicate says in the end.
//
// Clang cannot see that `mu` is the lock that a predicate requires, and so does not look into
// these functions; it does look at the predicates, and at who calls.
class CondVar {
 public:
  void NotifyOne() { cond_.notify_one(); }
  void NotifyAll() { cond_.notify_all(); }

  template <typename Predicate>
  void Wait(Mutex* mu, Predicate holds) PS_REQUIRES(mu) PS_NO_THREAD_SAFETY_ANALYSIS {
    Adopted lock(mu->mu_);
    cond_.wait(lock.held, holds);
  }

  template <typename Rep, typename Period, typename Predicate>
  bool WaitFor(Mutex* mu, std::chrono::duration<Rep, Period> limit, Predicate holds)
      PS_REQUIRES(mu) PS_NO_THREAD_SAFETY_ANALYSIS {
    Adopted lock(mu->mu_);
    return cond_.wait_for(lock.held, limit, holds);
  }

  template <typename Clock, typename Duration, typename Predicate>
  bool WaitUntil(Mutex* mu, std::chrono::time_point<Clock, Duration> deadline, Predicate holds)
      PS_REQUIRES(mu) PS_NO_THREAD_SAFETY_ANALYSIS {
    Adopted lock(mu->mu_);
    return cond_.wait_until(lock.held, deadline, holds);
  }

  // Until notified, or for no reason.
  void Wait(Mutex* mu) PS_REQUIRES(mu) PS_NO_THREAD_SAFETY_ANALYSIS {
    Adopted lock(mu->mu_);
    cond_.wait(lock.held);
  }

  // Likewise, or until the time is up.
  template <typename Clock, typename Duration>
  void WaitUntil(Mutex* mu, std::chrono::time_point<Clock, Duration> deadline)
      PS_REQUIRES(mu) PS_NO_THREAD_SAFETY_ANALYSIS {
    Adopted lock(mu->mu_);
    cond_.wait_until(lock.held, deadline);
  }

 private:
  // The caller's lock as the standard library wants it; the caller holds it afterwards too.
  struct Adopted {
    explicit Adopted(std::mutex& mu) : held(mu, std::adopt_lock) {}
    ~Adopted() { held.release(); }
    std::unique_lock<std::mutex> held;
  };

  std::condition_variable cond_;
};

}  // namespace ps

namespace byteps {
namespace core {

// A queue whose readers sleep until there is something to read.

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

#endif  // BYTEPS_BASE_MUTEX_H_
