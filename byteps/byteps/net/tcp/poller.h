// A thread that waits for sockets, and for times.
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
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/base/stall_watch.h"
#include "byteps/net/tcp/socket.h"

namespace ps {
namespace tcp {

// What is watched.  Readiness is told once (edge-triggered).
class Pollable {
 public:
  virtual ~Pollable() = default;
  // `events` are epoll's.  True: there is more to do, call again with 0.  No exception leaves it.
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

  // More is expected within microseconds: the thread looks for it a while before it sleeps, since
  // to be woken takes longer than that. Only in its own thread.
  void StayAwake() { awake_until_ = Clock::now() + kAwake; }

  // Ends the thread; tasks that wait are dropped.  Does nothing the second time.
  void Stop();

 private:
  static constexpr std::chrono::microseconds kAwake{50};

  void Loop();
  // As epoll_wait does, which blocks for so many milliseconds.
  int Await(epoll_event* events, int milliseconds);
  int MillisecondsToWait();
  void RunTasks();
  void Wake();
  std::shared_ptr<Pollable> Find(uint64_t number);

  Fd epoll_;
  Fd wake_;
  std::atomic<bool> stop_{false};
  Clock::time_point awake_until_;  // its thread's

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
