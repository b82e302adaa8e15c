#include "byteps/recovery/scheduler/trials.h"

#include <algorithm>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/membership/scheduler_membership.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace {

// Seconds that a server has to answer the scheduler after another node has reported their link as
// broken. The reporting node waits longer than that for the decision.
constexpr double kTrialSeconds = 4;

}  // namespace

bool Trials::AccuseServer(int accuser, const Node& server, const std::string& reason) {
  if (job_->settings.replace_servers_s <= 0) return false;
  {
    MutexLock lock(&job_->mu);
    const Member* const member = job_->roster.Find(server.id);
    if (member == nullptr || member->removed) return places_->IsVacant(server.id);
    // If these differ, another process has already replaced the accused server.
    const bool same = member->node.hostname == server.hostname &&
                      member->node.port == server.port && TokenOf(member->node) == TokenOf(server);
    if (!same) return true;
    if (IsWorkerId(accuser) && BreaksWithMost(server.id, accuser)) {
      lock.Unlock();
      return places_->Lose(server.id, reason);
    }
    if (table_->active() || IsServerId(accuser)) {
      accusations_.emplace(server.id,
                           Accusation{accuser, reason, Clock::now() + ToDuration(kTrialSeconds)});
      lock.Unlock();
      scheduler_->Wake();
      return true;
    }
  }
  // The job needs this worker, but another process may replace the server. So the server is
  // declared lost.
  return places_->Lose(server.id, reason);
}

bool Trials::AccuseWorker(int server, int worker, const std::string& reason) {
  {
    MutexLock lock(&job_->mu);
    if (!IsServerId(server) || !table_->active()) return false;
  }
  // The job needs its last replica, but another process may replace the server. So if the worker's
  // replica is the last, the server is declared lost.
  return replicas_->Lose(worker, reason) || places_->Lose(server, reason);
}

bool Trials::BreaksWithMost(int server, int worker) {
  if (!table_->active()) return false;
  const auto now = Clock::now();
  auto& replicas = broken_links_[server];
  replicas[table_->Of(Postoffice::IDtoRank(worker))] = now;
  std::erase_if(replicas,
                [&](const auto& one) { return now - one.second > ToDuration(kTrialSeconds); });
  if (replicas.size() < 2 || static_cast<int>(replicas.size()) * 2 <= table_->count()) {
    return false;
  }
  PS_PROBE(kServerBreaksWithMost);
  return true;
}

bool Trials::Acquit(int server) {
  std::vector<Accusation> false_ones;
  {
    MutexLock lock(&job_->mu);
    const auto [begin, end] = accusations_.equal_range(server);
    if (begin == end) return true;
    for (auto it = begin; it != end; ++it) false_ones.push_back(it->second);
    accusations_.erase(begin, end);
  }
  for (const Accusation& accusation : false_ones) {
    if (IsServerId(accusation.accuser)) {
      const std::string reason =
          scheduler_->NameOf(accusation.accuser) + " cannot go on: " + accusation.reason;
      if (!places_->Lose(accusation.accuser, reason)) scheduler_->FailJob(reason);
    } else if (!replicas_->Lose(accusation.accuser, accusation.reason)) {
      if (!places_->Lose(server, accusation.reason)) scheduler_->FailJob(accusation.reason);
      return false;
    }
  }
  return true;
}

Trials::Clock::time_point Trials::NextDue() const {
  job_->AssertHeld();
  auto due = Clock::time_point::max();
  for (const auto& [server, accusation] : accusations_) due = std::min(due, accusation.due);
  return due;
}

void Trials::Forget(int server) {
  job_->AssertHeld();
  accusations_.erase(server);
  broken_links_.erase(server);
  std::erase_if(accusations_, [=](const auto& one) { return one.second.accuser == server; });
}

void Trials::Clear() {
  job_->AssertHeld();
  accusations_.clear();
  broken_links_.clear();
}

void Trials::Condemn(Clock::time_point now) {
  std::map<int, std::string> gone;
  {
    MutexLock lock(&job_->mu);
    std::erase_if(accusations_, [&](const auto& entry) {
      if (now < entry.second.due) return false;
      gone[entry.first] = entry.second.reason;
      return true;
    });
  }
  for (const auto& [server, reason] : gone) {
    if (!places_->Lose(server, reason)) scheduler_->FailJob(reason);
  }
}

}  // namespace ps
