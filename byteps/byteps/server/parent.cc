#include "byteps/server/parent.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace byteps {
namespace core {
namespace {

// Between the end of a process's first thread or connection and that of the process.
constexpr auto kLimit = std::chrono::milliseconds(500);
constexpr auto kLook = std::chrono::milliseconds(5);

// For a signal handler: empty, or the log and its folder.
char log_file[4096];
char log_folder[4096];

// As a signal handler may call it.
void Remove() {
  if (log_file[0] == '\0') return;
  unlink(log_file);
  rmdir(log_folder);  // fails while another process has a log there
}

}  // namespace

bool Parent::Watch(const std::string& name, const std::string& log) {
  name_ = name;
  watched_ = true;
  const size_t slash = log.rfind('/');
  if (slash != std::string::npos && log.size() < sizeof(log_file)) {
    memcpy(log_folder, log.data(), slash);
    memcpy(log_file, log.data(), log.size());
  }
  prctl(PR_SET_PDEATHSIG, kParentEnded);
  // It may have ended before the kernel was asked to tell.
  return getppid() == pid_;
}

bool Parent::HasEnded() const {
  if (!watched_) return false;
  const auto deadline = std::chrono::steady_clock::now() + kLimit;
  while (getppid() == pid_) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kLook);
  }
  return true;
}

std::string Parent::How() const {
  const std::string parent =
      name_.empty() ? "process " + std::to_string(static_cast<int>(pid_)) : name_;
  return "stopped: " + parent + ", which started it, was lost";
}

void Parent::RemoveLog() const { Remove(); }

void Parent::EndAtOnce(int /*signal*/) {
  Remove();
  _exit(128 + SIGTERM);
}

}  // namespace core
}  // namespace byteps
