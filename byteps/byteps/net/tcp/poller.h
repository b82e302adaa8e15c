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

// A thread that waits for sockets, and for times.
//
// What is watched.  Readiness is told once (edge-triggered).
class Pollable {
 public:
  virtual ~Pollable() = default;
  // `events` are epoll's.  True: there is more to do, call again with 0.  No exception leaves it.
  // Calls come one after the other, of all that a poller watches, and so do its tasks.
  virtual bool OnReady(uint32_t events) = 0;
};

class Poller {
 public:
  using Clock = AwakeClock;
  using Task = std::function<void()>;

  // Its thread is called bps-NAME.
  explicit Poller(const std::string& name);
  explicit Poller(int number) : Poller("tcp-" + std::to_string(number)) {}
  ~Poller();  // stops
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // From now on its thread uses these cores alone.  False: the kernel refuses.  Before Stop.
  bool RunOn(const std::set<int>& cores);

  // Watches `fd` until Forget; `pollable` is kept until then.  Any thread.  Throws Error.
  void Watch(int fd, std::shared_ptr<Pollable> pollable);
  // Before `fd` is closed.  A call that is in flight goes on.  Any thread.
  void Forget(int fd);

  // Has the thread do it.  Any thread.
  void Post(Task task) { At(Clock::now(), std::move(task)); }
  void At(Clock::time_point when, Task task);

  // Serves what is ready, as its thread does: for who waits for an answer, and would else wait for
  // that thread to be woken.  Does nothing while something is being served.  Any thread.
  void ServeReady() PS_NO_THREAD_SAFETY_ANALYSIS;  // which cannot follow a lock that is tried

  // More may come within microseconds: where it did the last time, the thread looks for it a while
  // before it sleeps, since to be woken takes as long.  Only in OnReady and in tasks.
  void StayAwake() { stays_awake_ = true; }

  // Ends the thread; tasks that wait are dropped.  Does nothing the second time.
  void Stop();

 private:
  // From one small sum to the next, of workers that do nothing else, with the time to wake.
  static constexpr std::chrono::microseconds kAwake{250};

  void Loop();
  // As epoll_wait does, which blocks for so many milliseconds.
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
  std::atomic<bool> stays_awake_{false};                // in the next wait of its thread
  Clock::duration last_wait_ = Clock::duration::max();  // of its thread, after such a message

  Mutex serving_mu_;
  // Its thread is to serve next: those who wait would else take the lock again and again.
  std::atomic<bool> thread_serves_{false};
  // They have more to do.
  std::vector<uint64_t> unfinished_ PS_GUARDED_BY(serving_mu_);

  Mutex mu_;
  // A descriptor may be used again, a number is not: an event that was
  // fetched before Forget finds nothing.
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
