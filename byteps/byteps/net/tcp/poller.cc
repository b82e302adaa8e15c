#include "byteps/net/tcp/poller.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/link/nics.h"
#include "byteps/net/tcp/fd.h"

namespace ps {
namespace tcp {
namespace {

constexpr int kEvents = 64;

// Unlocks a mutex that TryLock locked.
struct Unlocking {
  Mutex* mu;
  ~Unlocking() PS_NO_THREAD_SAFETY_ANALYSIS { mu->Unlock(); }
};

}  // namespace

Poller::Poller(const std::string& name)
    : epoll_(Fd::Make([] { return epoll_create1(EPOLL_CLOEXEC); })),
      wake_(Fd::Make([] { return eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); })) {
  if (!epoll_ || !wake_) {
    throw Error(std::string("cannot wait for sockets: ") + strerror(errno) +
                "; raise the limit of open files (ulimit -n)");
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = 0;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0) ThrowErrno("epoll_ctl");
  thread_ = std::thread(&Poller::Loop, this);
  pthread_setname_np(thread_.native_handle(), ("bps-" + name).c_str());
}

Poller::~Poller() { Stop(); }

void Poller::Stop() {
  stop_ = true;
  Wake();
  // The thread was told to stop, so this wait is ended by its return; deadline: none.
  if (thread_.joinable()) thread_.join();
  // Pollables and tasks may own this poller, so they are destroyed without the lock.
  std::unordered_map<uint64_t, std::shared_ptr<Pollable>> watched;
  std::multimap<Clock::time_point, Task> tasks;
  MutexLock lock(&mu_);
  watched.swap(watched_);
  tasks.swap(tasks_);
  numbers_.clear();
  stopped_ = true;
}

bool Poller::RunOn(const std::set<int>& cores) { return ps::RunOn(&thread_, cores); }

void Poller::Wake() {
  const uint64_t one = 1;
  // EAGAIN: the counter is full, so the thread is awake already.
  if (write(wake_.get(), &one, sizeof(one)) < 0 && errno != EAGAIN) ThrowErrno("eventfd");
}

void Poller::Watch(int fd, std::shared_ptr<Pollable> pollable) {
  MutexLock lock(&mu_);
  if (stopped_) throw Error("the transport was stopped");
  const uint64_t number = ++last_number_;
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.u64 = number;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    throw Error(std::string("cannot wait for a socket: ") + strerror(errno));
  }
  watched_[number] = std::move(pollable);
  numbers_[fd] = number;
}

void Poller::Forget(int fd) {
  std::shared_ptr<Pollable> last;  // destroyed without the lock
  MutexLock lock(&mu_);
  auto it = numbers_.find(fd);
  if (it == numbers_.end()) return;
  (void)epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  auto watched = watched_.find(it->second);
  last = std::move(watched->second);
  watched_.erase(watched);
  numbers_.erase(it);
}

void Poller::At(Clock::time_point when, Task task) {
  {
    MutexLock lock(&mu_);
    if (stopped_) return;
    tasks_.emplace(when, std::move(task));
  }
  Wake();
}

std::shared_ptr<Pollable> Poller::Find(uint64_t number) {
  MutexLock lock(&mu_);
  auto it = watched_.find(number);
  return it == watched_.end() ? nullptr : it->second;
}

int Poller::MillisecondsToWait() {
  MutexLock lock(&mu_);
  if (tasks_.empty()) return -1;
  const auto wait = tasks_.begin()->first - Clock::now();
  const auto ms = std::chrono::ceil<std::chrono::milliseconds>(wait).count();
  return static_cast<int>(std::max<int64_t>(0, std::min<int64_t>(ms, 60000)));
}

void Poller::RunTasks() {
  while (true) {
    Task task;
    {
      MutexLock lock(&mu_);
      if (tasks_.empty() || tasks_.begin()->first > Clock::now()) return;
      task = std::move(tasks_.begin()->second);
      tasks_.erase(tasks_.begin());
    }
    try {
      task();
    } catch (const std::exception& e) {
      BPS_LOG(ERROR) << "a task of the TCP transport failed: " << e.what();
    }
  }
}

int Poller::Await(epoll_event* events, int milliseconds) {
  if (milliseconds == 0 || !stays_awake_.exchange(false)) {
    // The wait is ended by an event or Wake; deadline: that of the first timer.
    return epoll_wait(epoll_.get(), events, kEvents, milliseconds);
  }
  const auto begin = Clock::now();
  int count = 0;
  while (count == 0 && last_wait_ <= kAwake && Clock::now() < begin + kAwake) {
    // The wait is ended by the call itself; deadline: now.
    count = epoll_wait(epoll_.get(), events, kEvents, 0);
    if (count == 0) std::this_thread::yield();
  }
  // The wait is ended by an event or Wake; deadline: that of the first timer.
  if (count == 0) count = epoll_wait(epoll_.get(), events, kEvents, milliseconds);
  last_wait_ = Clock::now() - begin;
  return count;
}

void Poller::Serve(uint64_t number, uint32_t what) {
  const auto pollable = Find(number);
  if (pollable && pollable->OnReady(what)) unfinished_.push_back(number);
}

void Poller::Serve(const epoll_event* events, int count) {
  for (int i = 0; i < count; ++i) {
    if (events[i].data.u64 != 0) {
      Serve(events[i].data.u64, events[i].events);
      continue;
    }
    uint64_t value;
    // The read may find nothing, after another event.
    (void)!read(wake_.get(), &value, sizeof(value));
  }
}

void Poller::ServeReady() {
  if (thread_serves_ || !serving_mu_.TryLock()) return;
  const Unlocking serving{&serving_mu_};
  epoll_event events[kEvents];
  // The wait is ended by the call itself; deadline: now.
  const int count = epoll_wait(epoll_.get(), events, kEvents, 0);
  if (count <= 0) return;
  Serve(events, count);
  // Other work is left to the poller's thread. The caller handles only sockets that were ready.
  const bool woken = std::any_of(events, events + count,
                                 [](const epoll_event& event) { return event.data.u64 == 0; });
  if (!woken && unfinished_.empty()) return;
  thread_serves_ = true;
  Wake();
}

void Poller::Loop() {
  epoll_event events[kEvents];
  bool finished = true;
  while (!stop_) {
    const int count = Await(events, finished ? MillisecondsToWait() : 0);
    thread_serves_ = true;
    MutexLock serving(&serving_mu_);
    thread_serves_ = false;
    std::vector<uint64_t> before;
    before.swap(unfinished_);
    Serve(events, count);
    for (const uint64_t number : before) {
      // A pollable that was just served has reported by itself whether it has more to do.
      const bool served = std::any_of(events, events + std::max(count, 0),
                                      [&](const auto& event) { return event.data.u64 == number; });
      if (!served) Serve(number, 0);
    }
    finished = unfinished_.empty();
    RunTasks();
  }
}

}  // namespace tcp
}  // namespace ps
