#include "byteps/net/tcp/socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/link/name_service.h"
#include "byteps/net/link/nics.h"

namespace ps {
namespace tcp {
namespace {

constexpr int kBacklog = 4096;
// Keep-alive probes in the time after which a silent peer is lost.
constexpr int kProbes = 3;
// What the kernel may hold that it has not sent: enough to keep a link busy while a thread wakes,
// and no more, since urgent messages wait behind it.
constexpr int kUnsentBytes = 256 << 10;
// What is read of a peer that was answered, in all and in a turn.
constexpr size_t kLeftoverBytes = 256 << 10;
constexpr size_t kTurnBytes = 16 << 10;
// Files that a process opens in addition to its connections.
constexpr size_t kUsualFiles = 1024;

void Set(int fd, int level, int option, int value) {
  // Options make a connection better, none makes it right: an old kernel may lack some.
  (void)setsockopt(fd, level, option, &value, sizeof(value));
}

// False with errno: this host has no such address, or not any more.
bool BindTo(int fd, const std::string& from) {
  if (from.empty()) return true;
  // Many connections to one address share a port.
  Set(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1);
  const Address address = Resolve(from, 0).front();
  return bind(fd, address.get(), address.length) == 0;
}

}  // namespace

void Fd::Close() {
  if (fd_ < 0) return;
  // In a forked copy it was closed, and the number may be another file's.
  if (!IsForkedCopy()) {
    const HoldForks hold;
    KeepInChild(fd_);
    close(fd_);
  }
  fd_ = -1;
}

HostPair HostsOf(int fd) {
  const auto host = [fd](auto get) -> std::string {
    Address address;
    address.length = sizeof(address.storage);
    if (get(fd, address.get(), &address.length) != 0) return "";
    return address.Host();
  };
  return {host(getsockname), host(getpeername)};
}

Fd Listen(const Address& address, int* port) {
  Fd fd = Fd::Make([&address] {
    return socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  });
  if (!fd) throw Error(strerror(errno));
  Set(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  // IPv4 has a listener of its own.
  if (address.storage.ss_family == AF_INET6) Set(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, 1);
  if (bind(fd.get(), address.get(), address.length) != 0 || listen(fd.get(), kBacklog) != 0) {
    if (errno == EADDRNOTAVAIL) {
      throw UnknownHost("this machine has no address " + address.Host());
    }
    throw Error(strerror(errno));
  }
  Address bound;
  bound.length = sizeof(bound.storage);
  if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound.storage), &bound.length) != 0) {
    throw Error(strerror(errno));
  }
  // The port lies at the same place for both families.
  *port = ntohs(reinterpret_cast<const sockaddr_in*>(&bound.storage)->sin_port);
  return fd;
}

Fd BeginConnect(const Address& address, const std::string& from) {
  Fd fd = Fd::Make([&address] {
    return socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  });
  if (!fd) return fd;
  if (!BindTo(fd.get(), from) ||
      (connect(fd.get(), address.get(), address.length) != 0 && errno != EINPROGRESS)) {
    const int error = errno;
    fd.Close();
    errno = error;
  }
  return fd;
}

int ConnectError(int fd) {
  int error = 0;
  socklen_t length = sizeof(error);
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
  return error;
}

void SetOptions(int fd, double silence_s) {
  const int seconds = std::max(2, static_cast<int>(silence_s));
  Set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  Set(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, kUnsentBytes);
  Set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  Set(fd, IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, seconds / 2));
  Set(fd, IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, seconds / 2 / kProbes));
  Set(fd, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
  Set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, seconds * 1000);
}

Leftovers::Result Leftovers::Read(int fd) {
  char rest[4096];
  for (size_t turn = 0; turn < kTurnBytes;) {
    const ssize_t n = recv(fd, rest, sizeof(rest), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return kNothingYet;
    if (n <= 0) return kEnd;
    turn += n;
    bytes_ += n;
    if (bytes_ >= kLeftoverBytes) return kEnd;
  }
  return kMore;
}

void ResetOnClose(int fd) {
  const linger at_once = {1, 0};
  (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
}

size_t MakeRoomForFiles(size_t connections) {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return kUsualFiles;
  const rlim_t wanted = std::min<rlim_t>(connections + kUsualFiles, limit.rlim_max);
  if (limit.rlim_cur < wanted) {
    limit.rlim_cur = wanted;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) getrlimit(RLIMIT_NOFILE, &limit);
  }
  return limit.rlim_cur;
}

namespace {

void Count(ssize_t bytes, std::atomic<uint64_t>* counter) {
  counter->fetch_add(static_cast<uint64_t>(bytes), std::memory_order_relaxed);
}

}  // namespace

Stream::Stream(Fd fd, const tls::Context* tls, Side side) : fd_(std::move(fd)) {
  if (tls != nullptr) {
    tls_ = std::make_unique<tls::Session>(tls, fd_.get(), side == kConnects);
  }
}

ssize_t Stream::Read(const iovec* vector, int count) {
  const ssize_t n = tls_ ? tls_->Read(vector, count) : readv(fd_.get(), vector, count);
  if (n > 0 && counters_ != nullptr) Count(n, &counters_->bytes_received);
  return n;
}

ssize_t Stream::Write(const iovec* vector, int count) {
  const ssize_t n = tls_ ? tls_->Write(vector, count) : WritePlain(vector, count);
  if (n > 0 && counters_ != nullptr) Count(n, &counters_->bytes_sent);
  return n;
}

ssize_t Stream::WritePlain(const iovec* vector, int count) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(vector);
  message.msg_iovlen = count;
  return SendMessage(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void Stream::Say(const std::string& bytes) {
  const iovec whole = {const_cast<char*>(bytes.data()), bytes.size()};
  if (Write(&whole, 1) == static_cast<ssize_t>(bytes.size())) return;
  BPS_LOG(DEBUG) << "a greeting could not be sent: " << strerror(errno);
}

std::string Stream::Text(int error) {
  const std::string failure = tls_ && error == EPROTO ? tls_->failure() : "";
  return failure.empty() ? strerror(error) : failure;
}

namespace {

constexpr int kEvents = 64;

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
  // Ended by the end of its thread, which was told; deadline: none.
  if (thread_.joinable()) thread_.join();
  // They hold this poller.  They go without the lock.
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
  // A full counter (EAGAIN) has woken the thread already.
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
  std::shared_ptr<Pollable> last;  // goes without the lock
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
    // Ended by an event or Wake; deadline: that of the first timer.
    return epoll_wait(epoll_.get(), events, kEvents, milliseconds);
  }
  const auto begin = Clock::now();
  int count = 0;
  while (count == 0 && last_wait_ <= kAwake && Clock::now() < begin + kAwake) {
    // Ended by the call itself; deadline: now.
    count = epoll_wait(epoll_.get(), events, kEvents, 0);
    if (count == 0) std::this_thread::yield();
  }
  // Ended by an event or Wake; deadline: that of the first timer.
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
    (void)!read(wake_.get(), &value, sizeof(value));  // nothing there: another event of it
  }
}

namespace {

// Unlocks what was locked by TryLock.
struct Unlocking {
  Mutex* mu;
  ~Unlocking() PS_NO_THREAD_SAFETY_ANALYSIS { mu->Unlock(); }
};

}  // namespace

void Poller::ServeReady() {
  if (thread_serves_ || !serving_mu_.TryLock()) return;
  const Unlocking serving{&serving_mu_};
  epoll_event events[kEvents];
  // Ended by the call itself; deadline: now.
  const int count = epoll_wait(epoll_.get(), events, kEvents, 0);
  if (count <= 0) return;
  Serve(events, count);
  // What is left is its thread's: who waits need not do more than was there.
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
      // Served just now: it says itself whether it has more.
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
