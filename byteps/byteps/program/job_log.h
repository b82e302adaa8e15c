#ifndef BYTEPS_PROGRAM_JOB_LOG_H_
#define BYTEPS_PROGRAM_JOB_LOG_H_

#include <chrono>
#include <string>

#include "byteps/base/config.h"
#include "byteps/base/mutex.h"
#include "byteps/net/membership/event.h"

namespace byteps {
namespace core {

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

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_PROGRAM_JOB_LOG_H_
