// This process: its clock, the names of its threads, and its forks.
#ifndef BYTEPS_BASE_PROCESS_H_
#define BYTEPS_BASE_PROCESS_H_

#include <pthread.h>

#include <chrono>
#include <cstdint>
#include <string>

namespace byteps {
namespace core {

// Returns the time in ns on the steady clock, which measures intervals. Times of processes on the
// same host can be compared.
inline int64_t SteadyNs() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// Names the calling thread "bps-`name`", or "bps-`name`/`number`", for top -H, perf and debuggers.
// Linux keeps 15 characters.
inline void NameThisThread(const std::string& name, long number = -1) {
  const std::string text = "bps-" + name + (number < 0 ? "" : "/" + std::to_string(number));
  pthread_setname_np(pthread_self(), text.substr(0, 15).c_str());
}

}  // namespace core
}  // namespace byteps

namespace ps {

// Closes a transport's descriptors in forked processes.
//
// A forked child has copies of the descriptors, but not the threads that serve them. If the copies
// stayed open, peers would not notice the parent's end before the child has ended, too. So the
// child closes its copies before fork() returns. (For exec, O_CLOEXEC does the same.)

// Returns whether this process was forked while its parent used a transport. If so, this process
// must not touch the transport, because its locks may be held by threads that only the parent has.
bool IsForkedCopy();

// Blocks fork() in all threads as long as this object exists. Hold one while you create or close a
// descriptor. Meanwhile do not allocate memory: a waiting fork() may hold the allocator's locks.
class HoldForks {
 public:
  HoldForks();
  ~HoldForks();
  HoldForks(const HoldForks&) = delete;
  HoldForks& operator=(const HoldForks&) = delete;
};

// Makes forked children close `fd`. Call under the HoldForks under which `fd` was created.
void CloseInChild(int fd);

// Undoes CloseInChild. Call under the HoldForks under which `fd` is closed.
void KeepInChild(int fd);

// Makes forked children close a library's descriptor, as long as this object exists. Destroy this
// object before the library closes the descriptor.
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
