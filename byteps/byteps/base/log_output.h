// Writes to a file descriptor without waiting for its reader: a terminal that was stopped, or a
// collector of logs that hangs, must not stop the threads that move gradients.
#ifndef BYTEPS_BASE_LOG_OUTPUT_H_
#define BYTEPS_BASE_LOG_OUTPUT_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>

#include "byteps/base/mutex.h"

namespace ps {

// What the reader takes at once is written by the thread that calls Write.  The rest waits, up to
// `limit` bytes, for a thread of its own, which exists only meanwhile; beyond that, whole texts are
// dropped and counted.  Never destroyed, since that thread may be there until the process ends.
class LogOutput {
 public:
  // `fd` stays the caller's, and may come to mean another file.  `notice` is called with the
  // number of texts that were dropped once there is room again, with no lock held, and returns
  // what is to be written in their place.
  LogOutput(int fd, size_t limit, std::function<std::string(uint64_t)> notice);
  LogOutput(const LogOutput&) = delete;
  LogOutput& operator=(const LogOutput&) = delete;

  // Any thread.  Texts are written in the order of the calls.
  void Write(const std::string& text);

  // Waits until all has been written, `seconds` at most.
  void Flush(double seconds);

  // Around fork(): the child owns nothing of what waits in its parent.
  void BeforeFork();
  void AfterFork(bool in_child);

 private:
  // How the kernel is kept from blocking the writer.
  enum class Kind { kFile, kReopened, kSocket, kOther };

  void Look() PS_REQUIRES(mu_);
  // Bytes that were taken; all of them where nobody will ever read them.
  size_t Try(const char* data, size_t bytes) PS_REQUIRES(mu_);
  void Drain();

  const int fd_;
  const size_t limit_;
  const std::function<std::string(uint64_t)> notice_;

  Mutex mu_;
  CondVar empty_;
  bool known_ PS_GUARDED_BY(mu_) = false;
  Kind kind_ PS_GUARDED_BY(mu_) = Kind::kFile;
  dev_t device_ PS_GUARDED_BY(mu_) = 0;
  ino_t inode_ PS_GUARDED_BY(mu_) = 0;
  int reopened_ PS_GUARDED_BY(mu_) = -1;
  std::deque<std::string> waiting_ PS_GUARDED_BY(mu_);
  size_t waiting_bytes_ PS_GUARDED_BY(mu_) = 0;
  uint64_t dropped_ PS_GUARDED_BY(mu_) = 0;
  bool draining_ PS_GUARDED_BY(mu_) = false;
};

}  // namespace ps
#endif  // BYTEPS_BASE_LOG_OUTPUT_H_
