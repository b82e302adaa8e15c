#include "byteps/base/log_output.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <system_error>
#include <thread>
#include <utility>

namespace ps {
namespace {

// How often the draining thread looks again where the kernel does not tell it that there is room.
constexpr int kLookMs = 100;

bool HasRoom(int fd, int timeout_ms) {
  pollfd item{fd, POLLOUT, 0};
  return poll(&item, 1, timeout_ms) > 0;
}

}  // namespace

LogOutput::LogOutput(int fd, size_t limit, std::function<std::string(uint64_t)> notice)
    : fd_(fd), limit_(limit), notice_(std::move(notice)) {}

// The descriptor's file may be shared with other processes, which would not expect that it becomes
// non-blocking: pipes and terminals are opened once more for this process alone.
void LogOutput::Look() {
  struct stat now;
  if (fstat(fd_, &now) != 0) return;
  if (known_ && now.st_dev == device_ && now.st_ino == inode_) return;
  known_ = true;
  device_ = now.st_dev;
  inode_ = now.st_ino;
  if (reopened_ >= 0) close(reopened_);
  reopened_ = -1;
  kind_ = Kind::kFile;
  if (S_ISSOCK(now.st_mode)) kind_ = Kind::kSocket;
  if (!S_ISFIFO(now.st_mode) && !S_ISCHR(now.st_mode)) return;
  const std::string path = "/proc/self/fd/" + std::to_string(fd_);
  reopened_ = open(path.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  kind_ = reopened_ >= 0 ? Kind::kReopened : Kind::kOther;  // another user's: not ours to open
}

size_t LogOutput::Try(const char* data, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    ssize_t n = 0;
    const char* from = data + done;
    const size_t left = bytes - done;
    switch (kind_) {
      case Kind::kFile:
        n = write(fd_, from, left);
        break;
      case Kind::kReopened:
        n = write(reopened_, from, left);
        break;
      case Kind::kSocket:
        n = send(fd_, from, left, MSG_DONTWAIT | MSG_NOSIGNAL);
        break;
      case Kind::kOther:
        // Where there is room, there is room for so much.
        if (!HasRoom(fd_, 0)) return done;
        n = write(fd_, from, std::min<size_t>(left, PIPE_BUF));
        break;
    }
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return done;
    if (n < 0) return bytes;  // nobody reads: there is nobody to tell
    done += n;
  }
  return done;
}

void LogOutput::Write(const std::string& text) {
  MutexLock lock(&mu_);
  if (!draining_) {
    Look();
    const size_t done = Try(text.data(), text.size());
    if (done == text.size()) return;
    waiting_.push_back(text.substr(done));
  } else if (dropped_ > 0 || waiting_bytes_ + text.size() > limit_) {
    ++dropped_;
    return;
  } else {
    waiting_.push_back(text);
  }
  waiting_bytes_ += waiting_.back().size();
  if (draining_) return;
  draining_ = true;
  try {
    std::thread(&LogOutput::Drain, this).detach();
  } catch (const std::system_error&) {  // no thread to be had
    draining_ = false;
    waiting_.clear();
    waiting_bytes_ = 0;
    ++dropped_;
  }
}

void LogOutput::Drain() {
  pthread_setname_np(pthread_self(), "bps-log");
  MutexLock lock(&mu_);
  while (true) {
    while (!waiting_.empty()) {
      Look();
      std::string& text = waiting_.front();
      const size_t done = Try(text.data(), text.size());
      waiting_bytes_ -= done;
      if (done == text.size()) {
        waiting_.pop_front();
        continue;
      }
      text.erase(0, done);
      const int fd = kind_ == Kind::kReopened ? reopened_ : fd_;
      lock.Unlock();
      // One that says there is room where there is too little would be asked without end.
      if (HasRoom(fd, kLookMs)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      lock.Lock();
    }
    if (dropped_ == 0) break;
    const uint64_t dropped = std::exchange(dropped_, 0);
    lock.Unlock();
    std::string text = notice_(dropped);
    lock.Lock();
    waiting_bytes_ += text.size();
    waiting_.push_front(std::move(text));
  }
  draining_ = false;
  empty_.NotifyAll();
}

void LogOutput::Flush(double seconds) {
  MutexLock lock(&mu_);
  empty_.WaitFor(&mu_, std::chrono::duration<double>(seconds),
                 [this]() PS_REQUIRES(mu_) { return !draining_; });
}

// Held from one to the other.
void LogOutput::BeforeFork() PS_NO_THREAD_SAFETY_ANALYSIS { mu_.Lock(); }

void LogOutput::AfterFork(bool in_child) PS_NO_THREAD_SAFETY_ANALYSIS {
  if (in_child) {
    waiting_.clear();
    waiting_bytes_ = dropped_ = 0;
    draining_ = false;
  }
  mu_.Unlock();
}

}  // namespace ps
