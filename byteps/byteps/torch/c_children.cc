// The end of the processes that embedded mode started next to this rank (launcher/embedded.py).
//
// They end by themselves once every worker has left, and with this process at the latest.  So it
// stays until then.  What its end means for the job depends on its exit status, which Python's own
// exit handlers are not told, and after them there is no Python: the C library calls what is here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "byteps/base/log_line.h"
#include "byteps/torch/c_parts.h"

namespace py = pybind11;

namespace byteps {
namespace core {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kLook = std::chrono::milliseconds(10);

// (title, process id, log)
using ChildTuple = std::tuple<std::string, int, std::string>;

struct Children {
  const pid_t parent;
  std::vector<ChildTuple> running;
  const std::string folder;  // of their logs
  const Clock::duration patience;
  const Clock::duration grace;
  bool any_failed = false;

  // Until all have ended, no longer than to `deadline`, nor than `grace` after one has failed.
  void Await(Clock::time_point deadline, bool expected) {
    while (true) {
      const bool failed_before = any_failed;
      running.erase(std::remove_if(running.begin(), running.end(),
                                   [&](const ChildTuple& c) { return HasEnded(c, expected); }),
                    running.end());
      const auto now = Clock::now();
      if (any_failed && !failed_before) deadline = std::min(deadline, now + grace);
      if (running.empty() || now >= deadline) return;
      std::this_thread::sleep_for(kLook);
    }
  }

  bool HasEnded(const ChildTuple& child, bool expected) {
    const auto& [title, pid, log] = child;
    int status = 0;
    const pid_t ended = waitpid(pid, &status, WNOHANG);
    // Or a thread of Python's was faster, and said how it ended.
    if (ended != pid) return ended < 0;
    if (status == 0 || expected) return true;
    any_failed = true;
    const std::string how = WIFSIGNALED(status)
                                ? "signal " + std::to_string(WTERMSIG(status))
                                : "exit status " + std::to_string(WEXITSTATUS(status));
    ps::WriteLogLine('E', __FILE__, __LINE__,
                     "embedded " + title + " ended with " + how + "; its log is " + log);
    return true;
  }

  void End(int exit_status) {
    Await(Clock::now() + (exit_status == 0 ? patience : std::min(patience, grace)), false);
    for (const int number : {SIGTERM, SIGKILL}) {
      for (const auto& child : running) kill(std::get<1>(child), number);
      Await(Clock::now() + grace, true);
    }
    std::error_code ignored;
    if (!any_failed) std::filesystem::remove_all(folder, ignored);
  }
};

bool EndChildrenAtExit(std::vector<ChildTuple> running, std::string folder, double patience_s,
                       double grace_s) {
#ifdef __GLIBC__
  const auto duration = [](double seconds) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  };
  const auto end = [](int status, void* children) {
    auto* const mine = static_cast<Children*>(children);
    if (getpid() == mine->parent) mine->End(status);
  };
  return on_exit(end, new Children{getpid(), std::move(running), std::move(folder),
                                   duration(patience_s), duration(grace_s)}) == 0;
#else
  return false;
#endif
}

}  // namespace

void DefineChildren(py::module_* m) {
  m->def("end_children_at_exit", &EndChildrenAtExit, py::arg("running"), py::arg("folder"),
         py::arg("patience_s"), py::arg("grace_s"));
}

}  // namespace core
}  // namespace byteps
