#ifndef BYTEPS_NET_TCP_POLLER_H_
#define BYTEPS_NET_TCP_POLLER_H_

#include <sys/epoll.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "byteps/base/awake_clock.h"
#include "byteps/base/mutex.h"
#include "byteps/net/tcp/fd.h"

namespace ps {
namespace tcp {

// An object that a Poller watches: a thread that waits for sockets and timers. Readiness is
// reported once (edge-triggered).
class Pollable {
 public:
  virtual ~Pollable() = default;
  // `events` are epoll's. Returns true if there is more to do: it is then called again with 0. Must
  // not throw. A poller runs all its calls and tasks one after another.
  virtual bool OnReady(uint32_t events) = 0;
};

class Poller {
 public:
  using Clock = AwakeClock;
  using Task = std::function<void()>;

  // Names the thread bps-NAME.
  explicit Poller(const std::string& name);
  explicit Poller(int number) : Poller("tcp-" + std::to_string(number)) {}
  ~Poller();  // stops
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // Restricts the thread to these cores. Returns false if the kernel refuses. Call before Stop.
  bool RunOn(const std::set<int>& cores);

  // Watches `fd` until Forget; keeps `pollable` until then. Throws Error. Thread-safe.
  void Watch(int fd, std::shared_ptr<Pollable> pollable);
  // Call before `fd` is closed. A running call continues. Thread-safe.
  void Forget(int fd);

  // Runs the task in the poller's thread. Thread-safe.
  void Post(Task task) { At(Clock::now(), std::move(task)); }
  void At(Clock::time_point when, Task task);

  // Serves what is ready, in the calling thread, which waits for an answer: this saves a wake-up of
  // the poller's thread. Does nothing while another thread serves. Thread-safe.
  void ServeReady() PS_NO_THREAD_SAFETY_ANALYSIS;  // clang cannot follow TryLock

  // More data may come within microseconds. If it did last time, the thread polls for a while
  // before it sleeps, since a wake-up takes as long. Call in OnReady and tasks only.
  void StayAwake() { stays_awake_ = true; }

  // Ends the thread and drops waiting tasks. Idempotent.
  void Stop();

 private:
  // Time between the small all-reduces of workers that do nothing else, including a wake-up.
  static constexpr std::chrono::microseconds kAwake{250};

  void Loop();
  // Waits like epoll_wait, for at most `milliseconds`.
  int Await(epoll_event* events, int milliseconds);
  void Serve(const epoll_event* events, int count) PS_REQUIRES(serving_mu_);
  void Serve(uint64_t number, uint32_t what) PS_REQUIRES(serving_mu_);
  int MillisecondsToWait();
  void RunTasks();
  void Wake();
  std::shared_ptr<Pollable> Find(uint64_t number);

  Fd epoll_;
  Fd wake_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> stays_awake_{false};                // applies to the thread's next wait
  Clock::duration last_wait_ = Clock::duration::max();  // the thread's last wait after StayAwake

  Mutex serving_mu_;
  // The poller's thread serves next: otherwise waiting threads would take the lock again and again.
  std::atomic<bool> thread_serves_{false};
  // Pollables that have more to do.
  std::vector<uint64_t> unfinished_ PS_GUARDED_BY(serving_mu_);

  Mutex mu_;
  // Descriptors are reused, numbers are not: an event fetched before Forget finds nothing.
  std::unordered_map<uint64_t, std::shared_ptr<Pollable>> watched_ PS_GUARDED_BY(mu_);
  std::unordered_map<int, uint64_t> numbers_ PS_GUARDED_BY(mu_);
  uint64_t last_number_ PS_GUARDED_BY(mu_) = 0;
  bool stopped_ PS_GUARDED_BY(mu_) = false;
  std::multimap<Clock::time_point, Task> tasks_ PS_GUARDED_BY(mu_);

  std::thread thread_;
};

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_POLLER_H_
