// The process itself: its clock, names of its threads, and its forks.
#ifndef BYTEPS_BASE_PROCESS_H_
#define BYTEPS_BASE_PROCESS_H_

#include <pthread.h>

#include <chrono>
#include <cstdint>
#include <string>

namespace byteps {
namespace core {

// The clock that intervals are measured by.

// Nanoseconds since some moment that all processes of a host share.
inline int64_t SteadyNs() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// Threads by name, for those who look at a process (top -H, perf, a debugger).

// "bps-" and `name` and, where there are several, `number`: 15 characters are shown.
inline void NameThisThread(const std::string& name, long number = -1) {
  const std::string text = "bps-" + name + (number < 0 ? "" : "/" + std::to_string(number));
  pthread_setname_np(pthread_self(), text.substr(0, 15).c_str());
}

}  // namespace core
}  // namespace byteps

namespace ps {

// What becomes of a transport's descriptors in a forked process.
//
// A forked child has a copy of each of them, and none of the threads that serve them.  With the
// copies open, peers do not hear of the parent's end before the child's.  So the child closes them
// before fork() returns.  What is started by exec is another matter: all are made with O_CLOEXEC.

// Whether this process was forked while its parent's transport was in use.  It may touch nothing of
// it then: locks may be held by threads that it does not have.
bool IsForkedCopy();

// While one exists, fork() waits, in whichever thread.  To be held for as long as it takes to make
// or close a descriptor; nothing is allocated meanwhile, since fork() may hold the allocator's
// locks.
class HoldForks {
 public:
  HoldForks();
  ~HoldForks();
  HoldForks(const HoldForks&) = delete;
  HoldForks& operator=(const HoldForks&) = delete;
};

// Forked children close this descriptor.  Under the HoldForks under which it was made.
void CloseInChild(int fd);

// They do no longer.  Under the HoldForks under which it is closed.
void KeepInChild(int fd);

// Forked children close a descriptor that a library owns, for as long as this lives.  It goes
// before the library closes it.
class ClosedInChild {
 public:
  explicit ClosedInChild(int fd) : fd_(fd) {
    const HoldForks hold;
    CloseInChild(fd_);
  }
  ~ClosedInChild() {
    const HoldForks hold;
    KeepInChild(fd_);
  }
  ClosedInChild(const ClosedInChild&) = delete;
  ClosedInChild& operator=(const ClosedInChild&) = delete;

 private:
  const int fd_;
};

}  // namespace ps

#endif  // BYTEPS_BASE_PROCESS_H_
