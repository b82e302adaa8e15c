#include "byteps/program/parent.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>
#include <vector>

namespace byteps {
namespace core {
namespace {

// Longest time between the end of a process's first thread or connection and the kernel's sign that
// the process ends.
constexpr auto kLimit = std::chrono::milliseconds(500);
// Limit for a process that is ending: freeing its memory takes time, on cores that others use, too.
constexpr auto kEndingLimit = std::chrono::seconds(60);
constexpr auto kLook = std::chrono::milliseconds(5);

// Returns whether the process was killed, or has called exit.
bool IsEnding(pid_t pid) {
  constexpr unsigned long kExiting = 0x4;  // PF_EXITING
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  std::getline(file, stat);
  const size_t name_end = stat.rfind(')');  // the name may contain spaces and parentheses
  if (name_end == std::string::npos) return false;
  std::istringstream text(stat.substr(name_end + 1));
  const std::vector<std::string> fields{std::istream_iterator<std::string>(text), {}};
  // Fields are numbered from 1, as in proc(5); the name is field 2.
  const auto field = [&](size_t number) {
    return number - 3 < fields.size() ? strtoul(fields[number - 3].c_str(), nullptr, 10) : 0;
  };
  const unsigned long flags = field(9), pending = field(31);
  return (flags & kExiting) != 0 || (pending & (1ul << (SIGKILL - 1))) != 0;
}

}  // namespace

bool Parent::Watch(const std::string& name, const std::string& log) {
  name_ = name;
  watched_ = true;
  log_ = log;
  prctl(PR_SET_PDEATHSIG, kParentEnded);
  // The parent may have ended before the kernel was told to send the signal.
  return getppid() == pid_;
}

bool Parent::HasEnded() const {
  if (!watched_) return false;
  const auto start = std::chrono::steady_clock::now();
  while (getppid() == pid_) {
    const auto waited = std::chrono::steady_clock::now() - start;
    if (waited >= kEndingLimit || (waited >= kLimit && !IsEnding(pid_))) return false;
    // The wait is ended by the end of the parent; deadline: kEndingLimit.
    std::this_thread::sleep_for(kLook);
  }
  return true;
}

std::string Parent::How() const {
  const std::string parent =
      name_.empty() ? "process " + std::to_string(static_cast<int>(pid_)) : name_;
  return "stopped: " + parent + ", which started it, was lost";
}

void Parent::RemoveLog() const {
  const size_t slash = log_.rfind('/');
  if (slash == std::string::npos) return;
  unlink(log_.c_str());
  rmdir(log_.substr(0, slash).c_str());  // rmdir fails while another process has a log there
}

void Parent::EndAtOnce() const {
  RemoveLog();
  _exit(128 + SIGTERM);
}

}  // namespace core
}  // namespace byteps
