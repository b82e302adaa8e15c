// Locks that clang checks: the code states which lock guards which data, and which function needs
// which lock.
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
// Clang's -Wthread-safety rejects access to count_ without mu_; gcc ignores the annotations. The
// types wrap std::mutex, std::shared_mutex and std::condition_variable.
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

// For a member: this lock guards the member or, with PT, the memory to which the member points.
#define PS_GUARDED_BY(mu) PS_THREAD_SAFETY(guarded_by(mu))
#define PS_PT_GUARDED_BY(mu) PS_THREAD_SAFETY(pt_guarded_by(mu))
// For a function or lambda: the caller holds these locks (SHARED: for reading).
#define PS_REQUIRES(...) PS_THREAD_SAFETY(requires_capability(__VA_ARGS__))
#define PS_REQUIRES_SHARED(...) PS_THREAD_SAFETY(requires_shared_capability(__VA_ARGS__))
// For a function: the caller must not hold these locks, because the function takes them.
#define PS_EXCLUDES(...) PS_THREAD_SAFETY(locks_excluded(__VA_ARGS__))
// For a lock: a thread that needs both acquires this lock after these locks.
#define PS_ACQUIRED_AFTER(...) PS_THREAD_SAFETY(acquired_after(__VA_ARGS__))
// For a function that clang cannot analyze. A comment gives the reason.
#define PS_NO_THREAD_SAFETY_ANALYSIS PS_THREAD_SAFETY(no_thread_safety_analysis)

namespace ps {

class PS_THREAD_SAFETY(capability("mutex")) Mutex {
 public:
  void Lock() PS_THREAD_SAFETY(acquire_capability()) { mu_.lock(); }
  void Unlock() PS_THREAD_SAFETY(release_capability()) { mu_.unlock(); }
  // Acquires the lock if it is free. Returns whether it was.
  bool TryLock() PS_THREAD_SAFETY(try_acquire_capability(true)) { return mu_.try_lock(); }

 private:
  friend class CondVar;
  std::mutex mu_;
};

// Holds a lock for its lifetime, except between Unlock and Lock.
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

// A lock that many readers or a single writer can hold.
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

// Condition variable. A wait releases the caller's lock while it waits, and calls predicates with
// the lock held. A wait with a time limit returns the last result of its predicate.
//
// Clang cannot see that `mu` is the lock that a predicate requires. So clang does not analyze these
// functions, but it does analyze predicates and callers.
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

  // Waits until notified; may also wake up spuriously.
  void Wait(Mutex* mu) PS_REQUIRES(mu) PS_NO_THREAD_SAFETY_ANALYSIS {
    Adopted lock(mu->mu_);
    cond_.wait(lock.held);
  }

  // Waits until notified or until `deadline`; may also wake up spuriously.
  template <typename Clock, typename Duration>
  void WaitUntil(Mutex* mu, std::chrono::time_point<Clock, Duration> deadline)
      PS_REQUIRES(mu) PS_NO_THREAD_SAFETY_ANALYSIS {
    Adopted lock(mu->mu_);
    cond_.wait_until(lock.held, deadline);
  }

 private:
  // Adapts the caller's lock for the standard library. Afterwards the caller still holds the lock.
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

// Blocking queue for any number of writers and readers. After Close, readers get the remaining
// items. Then every Pop returns false at once.
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

  // Blocks until there is an item, and then returns true. Returns false if the queue is closed and
  // empty.
  bool Pop(T* item) {
    ps::MutexLock lock(&mu_);
    cond_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return closed_ || !items_.empty(); });
    return Take(item);
  }

  // Pops an item. Gives up after `timeout`. Sets `*timed_out` to whether it has given up, because a
  // closed queue also makes it return false.
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
