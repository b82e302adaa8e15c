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

// Object whose socket a Poller watches. The poller reports each readiness once (edge-triggered).
class Pollable {
 public:
  virtual ~Pollable() = default;
  // Handles readiness. `events`: epoll's event bits. Returns true if there is more to do; the
  // poller then calls OnReady again, with 0. Must not throw. A poller makes its calls and runs its
  // tasks one after another.
  virtual bool OnReady(uint32_t events) = 0;
};

// Thread that waits for sockets and timers.
class Poller {
 public:
  using Clock = AwakeClock;
  using Task = std::function<void()>;

  // Names the thread bps-NAME.
  explicit Poller(const std::string& name);
  explicit Poller(int number) : Poller("tcp-" + std::to_string(number)) {}
  ~Poller();  // calls Stop
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // Restricts the thread to these cores. Returns false if the kernel refuses. Call before Stop.
  bool RunOn(const std::set<int>& cores);

  // Watches `fd`, and keeps `pollable`, until Forget. Throws Error. Thread-safe.
  void Watch(int fd, std::shared_ptr<Pollable> pollable);
  // Stops watching `fd`. Call before `fd` is closed. A running OnReady continues. Thread-safe.
  void Forget(int fd);

  // Runs the task in the poller's thread. Thread-safe.
  void Post(Task task) { At(Clock::now(), std::move(task)); }
  void At(Clock::time_point when, Task task);

  // Calls OnReady of everything that is ready, in the calling thread. A thread that waits for an
  // answer calls this, which saves a wake-up of the poller's thread. Does nothing while another
  // thread serves. Thread-safe.
  void ServeReady() PS_NO_THREAD_SAFETY_ANALYSIS;  // clang cannot follow TryLock

  // Tells the thread that more data may come within microseconds. The thread then polls for up to
  // kAwake before it sleeps, because a wake-up would take as long as the data. It does not poll if
  // its last wait took longer than kAwake. Call in OnReady and tasks only.
  void StayAwake() { stays_awake_ = true; }

  // Ends the thread and drops waiting tasks. A second call does nothing.
  void Stop();

 private:
  // After StayAwake, the thread polls for this time before it sleeps. Workers that run small
  // all-reduces back to back send the next message within this time, so it costs no wake-up.
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
  // Whether the poller's thread is about to take serving_mu_. ServeReady then leaves the lock to
  // it. Otherwise threads that wait for answers could take the lock again and again.
  std::atomic<bool> thread_serves_{false};
  // Numbers of the pollables that have more to do.
  std::vector<uint64_t> unfinished_ PS_GUARDED_BY(serving_mu_);

  Mutex mu_;
  // Watched pollables by number. The kernel reuses descriptors, but the poller never reuses a
  // number. So an event that was fetched before Forget finds no pollable.
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
