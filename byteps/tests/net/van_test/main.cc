#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <thread>

#include "node.h"
#include "options.h"

namespace van_test {
namespace {

// How long the others may outlive one that ended badly.
constexpr double kGraceSeconds = 10;

struct Child {
  std::string name;
  bool may_be_killed = false;  // servers get their ranks as they come
  bool stays = false;          // until it is killed
};

// The child's process id; the child itself never returns.
pid_t Spawn(const std::string& role, int rank, int port, int port_pipe) {
  fflush(stdout);
  const pid_t pid = fork();
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  signal(SIGPIPE, SIG_IGN);
  const int status = RunNode(role, rank, port, port_pipe);
  fflush(stdout);
  _exit(status);
}

bool EndedWell(int status) { return WIFEXITED(status) && WEXITSTATUS(status) == 0; }
bool WasKilled(int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; }

// Waits for all of them; the number that did not end as they should.
int Wait(std::map<pid_t, Child> children) {
  const auto begin = Clock::now();
  double limit_s = options.timeout_s;
  int bad = 0;
  int to_be_killed = options.kill_role.empty() ? 0 : 1;
  while (!children.empty()) {
    int status = 0;
    if (std::all_of(children.begin(), children.end(),
                    [](const auto& c) { return c.second.stays; })) {
      for (const auto& child : children) {
        kill(child.first, SIGKILL);
        waitpid(child.first, &status, 0);
        if (!WasKilled(status)) ++bad;
      }
      break;
    }
    const pid_t pid = waitpid(-1, &status, WNOHANG);
    if (pid > 0) {
      if (to_be_killed > 0 && children[pid].may_be_killed && WasKilled(status)) {
        --to_be_killed;
      } else if (!EndedWell(status)) {
        printf("%s: FAILED, wait status %d\n", children[pid].name.c_str(), status);
        ++bad;
        // The others may wait for it as long as a job may take to start.
        limit_s = std::min(limit_s, Seconds(Clock::now() - begin) + kGraceSeconds);
      }
      children.erase(pid);
      continue;
    }
    if (Seconds(Clock::now() - begin) > limit_s) {
      for (const auto& child : children) {
        printf("%s: FAILED, still running after %.0f s\n", child.second.name.c_str(), limit_s);
        kill(child.first, SIGKILL);
        waitpid(child.first, &status, 0);
        ++bad;
      }
      return bad;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return bad + to_be_killed;
}

int RunAll() {
  int ends[2];
  if (pipe(ends) != 0) return 1;
  std::map<pid_t, Child> children;
  children[Spawn("scheduler", 0, 0, ends[1])] = {"scheduler", false};
  close(ends[1]);
  int port = 0;
  if (read(ends[0], &port, sizeof(port)) != sizeof(port)) {
    printf("the scheduler did not start\n");
    return Wait(children) + 1;
  }
  for (const std::string role : {"server", "worker"}) {
    for (int rank = 0; rank < (role == "server" ? options.servers : options.workers); ++rank) {
      const bool dies = options.kill_role == role;
      children[Spawn(role, rank, port, -1)] = {role + " " + std::to_string(rank), dies};
    }
  }
  for (int n = 0; n < options.refused; ++n) {
    const int rank = options.workers + n;
    children[Spawn("worker", rank, port, -1)] = {"refused " + std::to_string(n), false, true};
  }
  return Wait(children);
}

}  // namespace
}  // namespace van_test

int main(int argc, char** argv) {
  van_test::Parse(argc, argv);
  const int bad = van_test::RunAll();
  printf("van_test: %s\n", bad == 0 ? "ok" : "FAILED");
  return bad == 0 ? 0 : 1;
}
