#include "byteps/recovery/scheduler/held_failure.h"

#include <algorithm>

#include "byteps/net/link/net_address.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/scheduler_membership.h"

namespace ps {

using membership::Send;

namespace {

// Seconds after which a node whose link broke either counts as lost or has reconnected
// (LinkPatience).
constexpr double kHoldSeconds = 6;
constexpr double kLookSeconds = 0.05;

}  // namespace

bool HeldFailure::Includes(int worker) const {
  job_->AssertHeld();
  return held_ && held_->failed.count(worker) > 0;
}

HeldFailure::Clock::time_point HeldFailure::due() const {
  job_->AssertHeld();
  return held_ ? held_->due : Clock::time_point::max();
}

void HeldFailure::Clear() {
  job_->AssertHeld();
  held_.reset();
}

std::vector<int> HeldFailure::BrokenLinks(const std::set<int>& but) const {
  std::vector<int> there;
  {
    MutexLock lock(&job_->mu);
    there = job_->roster.PresentIds();
  }
  std::erase_if(there, [&](int id) { return but.count(id) > 0 || !job_->links->IsBroken(id); });
  return there;
}

bool HeldFailure::Hold(int worker, const std::string& what) {
  std::set<int> failed = {worker};
  {
    MutexLock lock(&job_->mu);
    if (held_) failed.insert(held_->failed.begin(), held_->failed.end());
  }
  const std::vector<int> broken = BrokenLinks(failed);
  std::string reason;
  {
    MutexLock lock(&job_->mu);
    const Member* const member = job_->roster.Find(worker);
    if (job_->state != ScheduledJob::State::kActive || member == nullptr || member->left)
      return false;
    if (held_) {
      if (held_->suspects.count(worker) > 0) return false;
      held_->failed.insert(worker);
    } else if (broken.empty()) {
      return false;
    } else {
      const auto now = Clock::now();
      held_ = Failure{worker,
                      what,
                      {worker},
                      {broken.begin(), broken.end()},
                      now + ToDuration(kLookSeconds),
                      now + ToDuration(kHoldSeconds)};
    }
    reason = Describe(member->node) + " " + what;
  }
  // The failed worker itself gets its answer at once.
  Send(job_->links, Control::JOB_FAILED, worker, reason);
  scheduler_->Wake();
  return true;
}

void HeldFailure::Decide(Clock::time_point now) {
  Failure held;
  {
    MutexLock lock(&job_->mu);
    if (!held_ || now < held_->due) return;
    held = *held_;
  }
  const bool waits = now < held.latest && !BrokenLinks(held.failed).empty();
  {
    MutexLock lock(&job_->mu);
    if (!held_) return;
    if (waits) {
      held_->due = now + ToDuration(kLookSeconds);
      return;
    }
    held_.reset();
  }
  scheduler_->OnGone(held.worker, held.what);
}

std::string HeldFailure::Then(int lost) const {
  job_->AssertHeld();
  if (!held_ || held_->worker == lost) return "";
  const Member* const member = job_->roster.Find(held_->worker);
  return member == nullptr ? "" : "; then " + Describe(member->node) + " " + held_->what;
}

}  // namespace ps
