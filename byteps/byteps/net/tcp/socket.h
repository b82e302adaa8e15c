// Sockets: owned descriptors, what encrypts them, and the thread that waits for them.
#ifndef BYTEPS_NET_TCP_SOCKET_H_
#define BYTEPS_NET_TCP_SOCKET_H_

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/base/process.h"
#include "byteps/net/link/counters.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/tls/tls.h"

namespace ps {
namespace tcp {

// Owns a file descriptor, which forked children close (base/process.h).
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) { CloseInChild(fd); }
  // What `open` returns, a descriptor or -1 with errno, also where another thread forks meanwhile.
  // It allocates nothing.
  template <typename Open>
  static Fd Make(const Open& open) {
    const HoldForks hold;
    return Fd(open());
  }
  Fd(Fd&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    other.Close();
    return *this;
  }
  ~Fd() { Close(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void Close();

 private:
  int fd_ = -1;
};

// Listens at `address`; with port 0 the kernel chooses, and `port` tells.  Throws
// Error with the reason.
Fd Listen(const Address& address, int* port);

// Begins to connect, from the address `from` of this host (empty: any); the socket is writable when
// that has ended.  Empty when it failed at once, with errno set.
Fd BeginConnect(const Address& address, const std::string& from = "");

// What became of it: 0, or an errno.
int ConnectError(int fd);

// The addresses, without ports, that a connected socket is between.  Empty: it is not connected any
// more.
struct HostPair {
  std::string here;
  std::string there;
};
HostPair HostsOf(int fd);

// For a connection: no delay of small messages; it breaks when the peer's host is silent for
// about `silence_s`.
void SetOptions(int fd, double silence_s);

// Reads and drops what a peer goes on sending after it was answered: to close over bytes that were
// not read would reset the connection, which could take the answer away from the peer.
class Leftovers {
 public:
  enum Result { kMore, kNothingYet, kEnd };
  // A little of it, so that others have their turn.  kEnd: the peer has closed, or sent too much.
  Result Read(int fd);

 private:
  size_t bytes_ = 0;
};

// When it is closed, the connection is reset: the kernel keeps nothing of it.
void ResetOnClose(int fd);

// Raises the soft limit of open files so that `connections` more fit, as far as the hard
// limit allows.  Returns how many files may be open.
size_t MakeRoomForFiles(size_t connections);

}  // namespace tcp
}  // namespace ps

// What ThreadSanitizer cannot see: memory that is sent belongs to the transport until the peer has
// it, and that news comes by way of another process.  Elsewhere all of this is nothing.
//
// A thread that sends notes that it reads the memory, before it does; so a write by a thread that
// has not waited for the end of the message is a race.  Where the end is known (the peer has told
// that it has the message, or its answer is about to be written to the same place) the memory is
// taken back, which orders all that follows behind the reads.

#if defined(__SANITIZE_THREAD__)
#define PS_WATCHES_THREADS 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define PS_WATCHES_THREADS 1
#endif
#endif

#ifdef PS_WATCHES_THREADS
extern "C" {
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
}
#endif

namespace ps {
namespace tcp {

#ifdef PS_WATCHES_THREADS

inline void NoteRead(const iovec& piece) { __tsan_read_range(piece.iov_base, piece.iov_len); }
// Of a value, behind the reads: `begin` is where it begins.
inline void HandOver(const void* begin) { __tsan_release(const_cast<void*>(begin)); }
inline void TakeBack(const void* begin) { __tsan_acquire(const_cast<void*>(begin)); }

// While it lives, nothing that this thread reads is noted: it was already.
class NotedAlready {
 public:
  NotedAlready() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
  ~NotedAlready() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
  NotedAlready(const NotedAlready&) = delete;
  NotedAlready& operator=(const NotedAlready&) = delete;
};

// The sanitizer's sendmsg would take every later recv of any socket for the end of these reads.
inline ssize_t SendMessage(int fd, const msghdr* message, int flags) {
  return syscall(SYS_sendmsg, fd, message, flags);
}

#else

inline void NoteRead(const iovec& /*piece*/) {}
inline void HandOver(const void* /*begin*/) {}
inline void TakeBack(const void* /*begin*/) {}
struct NotedAlready {
  NotedAlready() {}  // not a variable that nobody uses
};
inline ssize_t SendMessage(int fd, const msghdr* message, int flags) {
  return sendmsg(fd, message, flags);
}

#endif

// A socket that is connected or being connected, and what encrypts it, if anything does.
class Stream {
 public:
  enum Side { kConnects, kListens };

  // Encrypted by `tls`, which outlives it, unless that is null.
  Stream(Fd fd, const tls::Context* tls, Side side);

  int fd() const { return fd_.get(); }
  // From now on what is read and written counts there.  Before other threads use it.
  void CountAt(NicCounters* counters) { counters_ = counters; }

  // One thread reads, one writes; both as readv and sendmsg with MSG_DONTWAIT do.  After EAGAIN
  // the next Write is given the same bytes once more.
  ssize_t Read(const iovec* vector, int count);
  ssize_t Write(const iovec* vector, int count);
  // The first bytes on a socket: the kernel has room for them.  That it is closed is read soon.
  void Say(const std::string& bytes);
  // What `error`, an errno of Read or Write, means.
  std::string Text(int error);
  // Whether what failed is what the other end said, so that to try again is of no use.
  bool Refused(int error) const { return tls_ && error == EPROTO; }

  bool encrypted() const { return tls_ != nullptr; }
  // Of an encrypted one, before all else; see tls::Session.
  tls::Session::Step Handshake() { return tls_->Handshake(); }
  // The other end does not encrypt, and is told so.
  void GoPlain() { tls_.reset(); }
  // Bytes that both ends of this connection know, and nobody else; "" unless encrypted.
  std::string binding() const { return tls_ ? tls_->binding() : ""; }

 private:
  ssize_t WritePlain(const iovec* vector, int count);

  Fd fd_;
  NicCounters* counters_ = nullptr;
  std::unique_ptr<tls::Session> tls_;
};
using StreamPtr = std::shared_ptr<Stream>;

// A thread that waits for sockets, and for times.

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

#endif  // BYTEPS_NET_TCP_SOCKET_H_
