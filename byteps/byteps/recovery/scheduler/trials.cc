// Whose fault it is: of nodes whose link broke, and of workers that fail one after the other.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/membership/scheduler_membership.h"
#include "ps/internal/postoffice.h"

namespace ps {

using membership::Send;

namespace {

// How long a server has to be heard of after another node has said that their link broke.  Less
// than that node waits for the verdict.
constexpr double kTrialSeconds = 4;
// A node whose link broke is lost within so long, or is there again (LinkPatience).
constexpr double kHoldSeconds = 6;
constexpr double kLookSeconds = 0.05;

}  // namespace

bool SchedulerMembership::AccuseServer(int accuser, const Node& server, const std::string& reason) {
  if (settings_.replace_servers_s <= 0) return false;
  {
    MutexLock lock(&mu_);
    const Member* const member = roster_.Find(server.id);
    if (member == nullptr || member->removed) return vacancies_.count(server.id) > 0;
    // Another one has its place already.
    const bool same = member->node.hostname == server.hostname &&
                      member->node.port == server.port && TokenOf(member->node) == TokenOf(server);
    if (!same) return true;
    if (IsWorkerId(accuser) && BreaksWithMost(server.id, accuser)) {
      lock.Unlock();
      return LoseServer(server.id, reason);
    }
    if (replicas_.active() || IsServerId(accuser)) {
      trials_.accusations.emplace(
          server.id, Accusation{accuser, reason, Clock::now() + ToDuration(kTrialSeconds)});
      lock.Unlock();
      heartbeats_.Wake();
      return true;
    }
  }
  // Without that worker there is no job, without the server there may be.
  return LoseServer(server.id, reason);
}

bool SchedulerMembership::AccuseWorker(int server, int worker, const std::string& reason) {
  {
    MutexLock lock(&mu_);
    if (!IsServerId(server) || !replicas_.active()) return false;
  }
  // Without the last replica there is no job, without the server there may be.
  return LoseReplica(worker, reason) || LoseServer(server, reason);
}

bool SchedulerMembership::BreaksWithMost(int server, int worker) {
  if (!replicas_.active()) return false;
  const auto now = Clock::now();
  auto& replicas = trials_.broken_links[server];
  replicas[replicas_.Of(Postoffice::IDtoRank(worker))] = now;
  std::erase_if(replicas,
                [&](const auto& one) { return now - one.second > ToDuration(kTrialSeconds); });
  if (replicas.size() < 2 || static_cast<int>(replicas.size()) * 2 <= replicas_.count()) {
    return false;
  }
  PS_PROBE(kServerBreaksWithMost);
  return true;
}

bool SchedulerMembership::Acquit(int server) {
  std::vector<Accusation> false_ones;
  {
    MutexLock lock(&mu_);
    const auto [begin, end] = trials_.accusations.equal_range(server);
    if (begin == end) return true;
    for (auto it = begin; it != end; ++it) false_ones.push_back(it->second);
    trials_.accusations.erase(begin, end);
  }
  for (const Accusation& one : false_ones) {
    if (IsServerId(one.accuser)) {
      const std::string reason = NameOf(one.accuser) + " cannot go on: " + one.reason;
      if (!LoseServer(one.accuser, reason)) FailJob(reason);
    } else if (!LoseReplica(one.accuser, one.reason)) {
      if (!LoseServer(server, one.reason)) FailJob(one.reason);
      return false;
    }
  }
  return true;
}

void SchedulerMembership::Condemn(Clock::time_point now) {
  std::map<int, std::string> gone;
  {
    MutexLock lock(&mu_);
    std::erase_if(trials_.accusations, [&](const auto& entry) {
      if (now < entry.second.due) return false;
      gone[entry.first] = entry.second.reason;
      return true;
    });
  }
  for (const auto& [server, reason] : gone) {
    if (!LoseServer(server, reason)) FailJob(reason);
  }
}

// ------------------------------------------------------------------ workers that fail together

std::vector<int> SchedulerMembership::BrokenLinks(const std::set<int>& but) {
  std::vector<int> there;
  {
    MutexLock lock(&mu_);
    there = roster_.PresentIds();
  }
  std::erase_if(there, [&](int id) { return but.count(id) > 0 || !links_->IsBroken(id); });
  return there;
}

bool SchedulerMembership::HoldFailure(int worker, const std::string& what) {
  std::set<int> failed = {worker};
  {
    MutexLock lock(&mu_);
    if (trials_.held) failed.insert(trials_.held->failed.begin(), trials_.held->failed.end());
  }
  const std::vector<int> broken = BrokenLinks(failed);
  std::string reason;
  {
    MutexLock lock(&mu_);
    const Member* const member = roster_.Find(worker);
    if (state_ != State::kActive || member == nullptr || member->left) return false;
    if (trials_.held) {
      if (trials_.held->suspects.count(worker) > 0) return false;
      trials_.held->failed.insert(worker);
    } else if (broken.empty()) {
      return false;
    } else {
      const auto now = Clock::now();
      trials_.held = HeldFailure{worker,
                                 what,
                                 {worker},
                                 {broken.begin(), broken.end()},
                                 now + ToDuration(kLookSeconds),
                                 now + ToDuration(kHoldSeconds)};
    }
    reason = Describe(member->node) + " " + what;
  }
  // It need not wait for the verdict.
  Send(links_, Control::JOB_FAILED, worker, reason);
  heartbeats_.Wake();
  return true;
}

void SchedulerMembership::DecideHeld(Clock::time_point now) {
  HeldFailure held;
  {
    MutexLock lock(&mu_);
    if (!trials_.held || now < trials_.held->due) return;
    held = *trials_.held;
  }
  const bool waits = now < held.latest && !BrokenLinks(held.failed).empty();
  {
    MutexLock lock(&mu_);
    if (!trials_.held) return;
    if (waits) {
      trials_.held->due = now + ToDuration(kLookSeconds);
      return;
    }
    trials_.held.reset();
  }
  OnGone(held.worker, held.what);
}

std::string SchedulerMembership::ThenFailed(int lost) {
  if (!trials_.held || trials_.held->worker == lost) return "";
  const Member* const member = roster_.Find(trials_.held->worker);
  return member == nullptr ? "" : "; then " + Describe(member->node) + " " + trials_.held->what;
}

}  // namespace ps
