#ifndef BYTEPS_NET_MEMBERSHIP_SCHEDULED_JOB_H_
#define BYTEPS_NET_MEMBERSHIP_SCHEDULED_JOB_H_

#include <utility>

#include "byteps/base/awake_clock.h"
#include "byteps/base/mutex.h"
#include "byteps/net/membership/announcer.h"
#include "byteps/net/membership/membership_links.h"
#include "byteps/net/membership/membership_settings.h"
#include "byteps/net/membership/roster.h"

namespace ps {

// The scheduler's state of a job, shared by SchedulerMembership and its RosterPolicy.
struct ScheduledJob {
  using Clock = AwakeClock;
  // kTurning: the scheduler is telling the nodes of a failure. After that it waits for the nodes of
  // the job's next generation.
  enum class State { kActive, kTurning, kFailed, kEnded, kStopped };

  ScheduledJob(MembershipLinks* l, const MembershipSettings& s, Announcer::Listener listener)
      : links(l), settings(s), announcer(std::move(listener)) {}

  // Tells clang that the caller holds mu, perhaps under another name.
  void AssertHeld() const PS_THREAD_SAFETY(assert_capability(mu)) {}

  MembershipLinks* const links;
  const MembershipSettings settings;
  Announcer announcer;

  // Held while nodes of a running job are told of changes, so that all nodes get the changes in the
  // same order. Acquired before mu.
  Mutex telling_mu;
  Mutex mu;
  State state PS_GUARDED_BY(mu) = State::kActive;
  Roster roster PS_GUARDED_BY(mu);
  int generation PS_GUARDED_BY(mu) = 1;
  // Number of this scheduler, higher than those of all earlier schedulers of the job.
  int scheduler_number PS_GUARDED_BY(mu) = 1;
  bool any_worker PS_GUARDED_BY(mu) = false;  // a worker has come
  bool has_begun PS_GUARDED_BY(mu) = false;   // all nodes have come
  Clock::time_point last_arrival PS_GUARDED_BY(mu);
};

}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_SCHEDULED_JOB_H_
