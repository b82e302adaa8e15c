// A node whose scheduler has died, and may return (docs/design/replicas.md).
#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/log.h"
#include "byteps/base/probe.h"
#include "byteps/net/link/node_text.h"
#include "byteps/net/membership/account.h"
#include "byteps/net/membership/node_membership.h"
#include "ps/internal/postoffice.h"

namespace ps {

using membership::MemberWord;
using membership::NameOfScheduler;
using membership::Send;

namespace {

// Between two attempts to reach it.
constexpr double kPauseSeconds = 0.2;
// Before what broke meanwhile is told: others may speak.
constexpr double kWordSeconds = 0.5;
// In this time a scheduler that has heard all, and all servers, remove a replica.
constexpr double kRemovalSeconds = 3;

}  // namespace

void NodeMembership::Tell(Control::Command command, const std::string& body,
                          const std::vector<Node>& nodes) {
  {
    // Who has not been taken back may say no more than that it returns.
    MutexLock lock(&mu_);
    if (absence_) return;
  }
  Send(links_, command, kScheduler, body, nodes);
}

bool NodeMembership::AwaitScheduler(const std::string& how) {
  {
    MutexLock lock(&mu_);
    if (settings_.scheduler_return_s <= 0) return false;
    if (state_ == State::kJoining) {
      scheduler_loss_.reset();
      EndJoin({Failure::kComeAgain, "the " + NameOfScheduler(*links_) + " was lost: " + how});
      return true;
    }
    if (state_ != State::kActive) return false;
    PS_PROBE(kSchedulerAway);
    scheduler_loss_.reset();
    asked_.marked.reset();
    const auto now = Clock::now();
    absence_ = Absence{how, now, now + ToDuration(settings_.scheduler_return_s), now, false, ""};
  }
  BPS_LOG(WARNING) << NameOfScheduler(*links_) << " was lost: " << how << "; it has "
                   << Limit(settings_.scheduler_return_s, "BYTEPS_SCHEDULER_RETURN_S")
                   << " to return, and the job goes on meanwhile";
  heartbeats_.Wake();
  return true;
}

void NodeMembership::LookForScheduler(Clock::time_point now) {
  std::string failure;
  {
    MutexLock lock(&mu_);
    if (!absence_ || !InJob()) return;
    if (now >= absence_->deadline) {
      failure = NameOfScheduler(*links_) + " was lost: " + absence_->how +
                "; it did not return within " +
                Limit(settings_.scheduler_return_s, "BYTEPS_SCHEDULER_RETURN_S") +
                (absence_->last_error.empty() ? "" : ": " + absence_->last_error);
      // Its work is done, and only the answer is missing.
      if (asked_.leaves) return Enter(State::kEnded);
    } else if (absence_->dials || now < absence_->next) {
      return;
    }
    absence_->dials = true;
  }
  if (!failure.empty()) return Fail(failure);
  links_->Disconnect(kScheduler);
  links_->Connect(links_->scheduler());
  Node self = links_->self();
  self.aux_id = self.role == Node::WORKER ? Postoffice::IDtoRank(self.id) : -1;
  Send(links_, Control::ADD_NODE, kScheduler,
       PackClaim(MakeClaim(self)) + PackAccount(MakeAccount()), {self});
}

membership::Account NodeMembership::MakeAccount() {
  membership::Account account;
  account.job = links_->job();
  MutexLock lock(&mu_);
  account.life = life_;
  account.is_late = is_late_;
  account.replicas = view_;
  account.turns = turns_;
  for (const auto& [id, member] : roster_.members()) {
    const bool left = member.node.role == Node::WORKER && member.left && !member.removed;
    if (left) account.left.insert(Postoffice::IDtoRank(id));
  }
  return account;
}

bool NodeMembership::NotFound(const std::string& how) {
  if (!absence_) return false;
  absence_->dials = false;
  absence_->last_error = how;
  absence_->next = Clock::now() + ToDuration(kPauseSeconds);
  heartbeats_.Wake();
  return true;
}

bool NodeMembership::lacks_scheduler() {
  MutexLock lock(&mu_);
  return absence_ || Clock::now() < settled_;
}

bool NodeMembership::OnReturn(int life) {
  double seconds = 0;
  {
    MutexLock lock(&mu_);
    const bool is_earlier = life < life_;
    if (!is_earlier) life_ = life;
    if (!absence_) return false;
    if (is_earlier) {
      lock.Unlock();
      Fail("an earlier scheduler answers at " + NameOfScheduler(*links_) +
           " than the one that this node has heard");
      return true;
    }
    seconds = std::chrono::duration<double>(Clock::now() - absence_->since).count();
    absence_.reset();
    settled_ = Clock::now() + ToDuration(settings_.scheduler_return_s + kRemovalSeconds);
    scheduler_loss_.reset();
    for (auto& [id, link] : broken_links_) {
      link.reported = false;
      link.due = Clock::now() + ToDuration(kWordSeconds);
    }
  }
  char after[32];
  snprintf(after, sizeof(after), "%.1f s", seconds);
  BPS_LOG(WARNING) << NameOfScheduler(*links_) << " is there again after " << after;
  AskAgain();
  heartbeats_.Wake();
  return true;
}

void NodeMembership::AskAgain() {
  std::vector<std::string> words;
  std::string farewell;
  {
    MutexLock lock(&mu_);
    const int rank = Postoffice::IDtoRank(links_->self().id);
    const int count = view_.count();
    const auto waits = [&](int replica) PS_REQUIRES(mu_) { return view_.waiting[replica] == '1'; };
    if (asked_.ready) {
      const int replica = count > 0 ? rank / (view_.workers / count) : 0;
      const bool is_told = count > 0 && (view_.IsPresent(replica) || waits(replica));
      if (!is_told) words.push_back(membership::PackWord({MemberWord::kReady}));
    }
    if (asked_.admit && asked_.admit->number < count && waits(asked_.admit->number) &&
        view_.lives[asked_.admit->number] == asked_.admit->epoch) {
      words.push_back(membership::PackWord(*asked_.admit));
    }
    words.insert(words.end(), asked_.words.begin(), asked_.words.end());
    if (asked_.leaves) farewell = asked_.farewell;
  }
  if (!words.empty() || !farewell.empty()) PS_PROBE(kAskedAgain);
  for (const std::string& word : words) Tell(Control::MEMBERS, word);
  if (!farewell.empty()) Tell(Control::LEAVE, farewell);
}

void NodeMembership::Remember(const MemberWord& word) {
  if (settings_.scheduler_return_s <= 0) return;
  if (word.kind == MemberWord::kReady) asked_.ready = true;
  if (word.kind == MemberWord::kAdmit) asked_.admit = word;
  if (word.kind == MemberWord::kAwaited || word.kind == MemberWord::kLate) {
    asked_.words.push_back(membership::PackWord(word));
  }
}

void NodeMembership::OnHeartbeat() {
  MutexLock lock(&mu_);
  if (!asked_.marked) return;
  const auto answered = static_cast<long>(std::min(*asked_.marked, asked_.words.size()));
  asked_.words.erase(asked_.words.begin(), asked_.words.begin() + answered);
  asked_.marked.reset();
}

}  // namespace ps
