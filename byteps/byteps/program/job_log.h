#ifndef BYTEPS_PROGRAM_JOB_LOG_H_
#define BYTEPS_PROGRAM_JOB_LOG_H_

#include <chrono>
#include <string>

#include "byteps/base/config.h"
#include "byteps/base/mutex.h"
#include "byteps/net/membership/event.h"

namespace byteps {
namespace core {

// Log lines of a scheduler or server about its job, with severity INFO.
//
// The number of lines is bounded: the first nodes get a line each, and the others are counted every
// ten seconds.

class JobLog {
 public:
  using Clock = std::chrono::steady_clock;

  // `version`: version of this build.
  JobLog(const Config& config, Role role, const char* version);

  // Thread-safe.
  void OnEvent(const ps::MembershipEvent& event);

  // Logs, on a server, that all nodes are present.
  void OnComplete(int rank, int workers);
  // Logs, on a server that outlived a job, that it joins the next generation.
  void OnRestart();

  // Logs, on the scheduler, which nodes are missing, and the nodes that were only counted, if it is
  // time. Returns the time of the next call.
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
  // In this generation: lines that name a node, and nodes that were only counted.
  int joined_named_ PS_GUARDED_BY(mu_) = 0;
  int joined_counted_ PS_GUARDED_BY(mu_) = 0;
  int left_named_ PS_GUARDED_BY(mu_) = 0;
  int left_counted_ PS_GUARDED_BY(mu_) = 0;
  std::string left_last_ PS_GUARDED_BY(mu_);
  bool said_listens_ PS_GUARDED_BY(mu_) = false;
  Clock::time_point next_ PS_GUARDED_BY(mu_);
  Clock::duration pause_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_PROGRAM_JOB_LOG_H_
