// The program byteps-server: its command line, its checks, what it says of its job, and
// the job.
#ifndef BYTEPS_SERVER_SERVE_H_
#define BYTEPS_SERVER_SERVE_H_

#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "byteps/base/config.h"
#include "byteps/base/mutex.h"
#include "byteps/net/membership/event.h"
#include "byteps/server/parent.h"

namespace byteps {
namespace core {

// Whether a scheduler or server is well: what a container's health check asks.

// Answers each connection to a Unix socket with one line, until it is destroyed.
class HealthServer {
 public:
  // Binds `path`, in the place of a socket that a process that is gone left there.  `describe`
  // is called by the thread that answers, once for each question; a process that hangs in it
  // does not answer, and so is not well.  Throws UsageError when it cannot listen there.
  HealthServer(const std::string& path, std::function<std::string()> describe);
  // Removes the socket.
  ~HealthServer();
  HealthServer(const HealthServer&) = delete;
  HealthServer& operator=(const HealthServer&) = delete;

 private:
  void Run();

  const std::string path_;
  const std::function<std::string()> describe_;
  int listener_ = -1;
  int wake_ = -1;
  std::thread thread_;
};

// What the process at `path` says of itself.  Throws Error that says what happened when it
// does not answer within `timeout_s` seconds.
std::string AskHealth(const std::string& path, double timeout_s);

// The command line of byteps-server, and what all it does demands of the settings.

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;
// Of --check: nothing is wrong here, but nobody answers at the scheduler's address.
constexpr int kExitNoScheduler = 3;

extern const char kUsage[];

struct Arguments {
  std::string role;
  std::string port_file;
  bool die_with_parent = false;
  std::string parent_name;
  std::string log;
  int check = 0;  // so many processes like this one, on this machine; 0: no check
};

// The role that --role, or else DMLC_ROLE, gives.  Throws UsageError where there is none, or one
// that byteps-server does not run.
Role ChooseRole(const Arguments& arguments, const Config& config);

// Throws UsageError where an address or a number that the role needs is missing.
void CheckAddress(const Config& config, Role role);

void WarnOfUnknownVariables();

// byteps-server --check: whether this process could join the job, and joins nothing.

// Prints a line for each thing that was tried: "ok    ..." or "WRONG ...".  Returns the exit
// status.
int Check(const Arguments& arguments, const char* version);

// What a scheduler or server says of its job as it goes: lines of severity INFO.
//
// However many nodes a job has, their number is bounded: the first of them are named, one a line,
// and the others counted every ten seconds.

class JobLog {
 public:
  using Clock = std::chrono::steady_clock;

  // `version` is of this build.
  JobLog(const Config& config, Role role, const char* version);

  // Any thread.
  void OnEvent(const ps::MembershipEvent& event);

  // On a server: all nodes are there.
  void OnComplete(int rank, int workers);
  // On a server that outlived a job.
  void OnRestart();

  // On the scheduler: says who is missing, and what was only counted, if it is time.  Returns when
  // it should be called again.
  Clock::time_point Look(const ps::JobView& view, Clock::time_point now);

 private:
  void SayListens(const std::string& address);
  void SayAdmitted(const ps::MembershipEvent& event) PS_REQUIRES(mu_);
  void SayComplete(const ps::MembershipEvent& event) PS_REQUIRES(mu_);
  void SayLeft(const ps::MembershipEvent& event) PS_REQUIRES(mu_);

  const Role role_;
  const std::string version_;
  const std::string scheduler_;
  const std::string transport_;
  const std::string size_;  // "4 workers and 2 servers"

  ps::Mutex mu_;
  // Of this generation: lines that name a node, and nodes that were only counted.
  int joined_named_ PS_GUARDED_BY(mu_) = 0;
  int joined_counted_ PS_GUARDED_BY(mu_) = 0;
  int left_named_ PS_GUARDED_BY(mu_) = 0;
  int left_counted_ PS_GUARDED_BY(mu_) = 0;
  std::string left_last_ PS_GUARDED_BY(mu_);
  bool said_listens_ PS_GUARDED_BY(mu_) = false;
  Clock::time_point next_ PS_GUARDED_BY(mu_);
  Clock::duration pause_ PS_GUARDED_BY(mu_);
};

// The scheduler or a server, from its start to the end of its job.

// Returns the exit status.  Throws Error when the job fails or cannot be joined.
int Serve(const Arguments& arguments, const Parent& parent, const char* version);

// The signal that this process was told to end by; 0: none.
int CaughtSignal();

// The exit status of a process that ends by it.
int SignalStatus();

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_SERVER_SERVE_H_
