// Handling of the scheduler's death and return on the other nodes (docs/design/losses.md).
#include <algorithm>
#include <chrono>
#include <set>
#include <string>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/membership/node_membership.h"
#include "byteps/net/membership/roster.h"
#include "byteps/net/membership/words.h"
#include "ps/internal/postoffice.h"

namespace ps {

using membership::MemberWord;
using membership::NameOfScheduler;
using membership::Send;

namespace {

// Pause between attempts to reach the scheduler.
constexpr double kPauseSeconds = 0.2;
// Delay before broken links are reported to a returned scheduler. All other messages are more
// urgent.
constexpr double kWordSeconds = 0.5;
// Time in which a returned scheduler that knows all nodes removes a replica, and all servers apply
// the removal.
constexpr double kRemovalSeconds = 3;

}  // namespace

void NodeMembership::Tell(Control::Command command, const std::string& body,
                          const std::vector<Node>& nodes) {
  {
    // A node that is not readmitted yet may only register.
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
      // This worker has finished its work; only the scheduler's answer to its LEAVE is missing.
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
       membership::PackRegistration({MakeClaim(self), MakeAccount()}), {self});
}

membership::Account NodeMembership::MakeAccount() {
  membership::Account account;
  account.job = links_->job();
  MutexLock lock(&mu_);
  account.scheduler_number = scheduler_number_;
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

bool NodeMembership::OnReturn(int scheduler_number) {
  double seconds = 0;
  {
    MutexLock lock(&mu_);
    const bool is_earlier = scheduler_number < scheduler_number_;
    if (!is_earlier) scheduler_number_ = scheduler_number;
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
      if (!is_told) words.push_back(membership::Pack(MemberWord(membership::Ready())));
    }
    if (asked_.admit && asked_.admit->replica < count && waits(asked_.admit->replica) &&
        view_.ready_epochs[asked_.admit->replica] == asked_.admit->ready_epoch) {
      words.push_back(membership::Pack(MemberWord(*asked_.admit)));
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
  if (std::holds_alternative<membership::Ready>(word)) asked_.ready = true;
  if (const auto* admit = std::get_if<membership::Admit>(&word)) asked_.admit = *admit;
  if (std::holds_alternative<membership::Awaited>(word) ||
      std::holds_alternative<membership::Late>(word)) {
    asked_.words.push_back(membership::Pack(word));
  }
}

void NodeMembership::OnHeartbeat() {
  MutexLock lock(&mu_);
  if (!asked_.marked) return;
  const auto answered = static_cast<long>(std::min(*asked_.marked, asked_.words.size()));
  asked_.words.erase(asked_.words.begin(), asked_.words.begin() + answered);
  asked_.marked.reset();
}

// ----- messages about replicas and lost servers (docs/design/losses.md)

void NodeMembership::OnMemberWord(const Message& msg) {
  const auto word = membership::Parse<MemberWord>(msg.meta.body);
  const auto& nodes = msg.meta.control.node;
  if (!word) return;
  if (const auto* view = std::get_if<ReplicaView>(&*word)) {
    OnReplicas(*view, nodes);
  } else if (const auto* lost = std::get_if<membership::ServerLost>(&*word)) {
    LoseServer(lost->rank, lost->turn, lost->reason);
  } else if (const auto* replaced = std::get_if<membership::ServerReplaced>(&*word)) {
    if (nodes.size() == 1) OnReplaced(*replaced, nodes[0]);
  } else if (const auto* awaited = std::get_if<membership::Awaited>(&*word)) {
    MembershipEvent event;
    event.kind = MembershipEvent::kAwaited;
    event.rank = awaited->rank;
    event.round = awaited->round;
    event.report = awaited->tensor;
    announcer_.Tell(event);
  }
}

void NodeMembership::OnReplicas(const ReplicaView& view, const std::vector<Node>& removed) {
  MembershipEvent event;
  event.kind = MembershipEvent::kReplicas;
  event.replicas = view;
  const bool server = links_->self().role == Node::SERVER;
  {
    MutexLock lock(&mu_);
    const int last = view_.count() > 0 ? view_.epoch : -1;
    if (view.count() == 0 || state_ != State::kActive || view.epoch <= last) return;
    view_ = view;
    view_.news.clear();
    // Broken links to removed nodes are expected. No other process has taken their ids yet.
    for (const Node& node : removed) {
      Member* const member = roster_.Put(node);
      member->left = member->removed = true;
      // The broken link must not be reported later, when another process has this id.
      broken_links_.erase(node.id);
    }
    const std::set<int> absent = view.AbsentRanks();
    for (int rank = 0; rank < view.workers; ++rank) {
      const Member* const member = roster_.Find(IdOf(Node::WORKER, rank));
      if (member != nullptr && member->removed && absent.count(rank) == 0) {
        roster_.Erase(member->node.id);
        if (server) PS_PROBE(kJoinerExpected);
      }
    }
  }
  for (const Node& node : removed) links_->Disconnect(node.id);
  announcer_.Tell(event);
  if (!server) return;
  SayOfReplica(membership::Acknowledged{view.epoch});
}

bool NodeMembership::LoseServer(int rank, int turn, const std::string& reason) {
  const int id = IdOf(Node::SERVER, rank);
  if (id == links_->self().id) return false;
  bool is_lost_now = false;
  {
    MutexLock lock(&mu_);
    int& last = turns_[rank];
    // A scheduler that has returned repeats events; this node may already know them.
    if (state_ != State::kActive || turn <= last) return false;
    is_lost_now = last % 2 == 0;
    last = turn;
    broken_links_.erase(id);
    Member* const member = roster_.Find(id);
    // The member's broken links are expected.
    if (member != nullptr) member->left = member->removed = true;
  }
  if (!is_lost_now) return true;
  links_->Disconnect(id);
  MembershipEvent event;
  event.kind = MembershipEvent::kServerLost;
  event.rank = rank;
  event.reason = reason;
  announcer_.Tell(event);
  return true;
}

void NodeMembership::OnReplaced(const membership::ServerReplaced& word, const Node& successor) {
  const int id = IdOf(Node::SERVER, word.rank);
  if (successor.role != Node::SERVER || successor.id != id) return;
  if (!LoseServer(word.rank, word.turn, RoleAndRank(id) + " was lost")) return;
  MembershipEvent event;
  event.kind = MembershipEvent::kServerReplaced;
  event.rank = word.rank;
  event.node = InfoOf(successor);
  // Only servers that back up each other have links. All nodes announce the event, because workers
  // wait for it.
  const Node self = links_->self();
  const bool worker = self.role == Node::WORKER;
  if (worker || settings_.backups) {
    MutexLock lock(&mu_);
    roster_.Erase(id);
    roster_.Put(successor);
  }
  const bool near =
      settings_.backups && AreNeighbors(Postoffice::IDtoRank(self.id), word.rank, word.servers);
  if (worker || near) links_->Connect(successor);
  announcer_.Tell(event);
}

void NodeMembership::SayOfReplica(membership::MemberWord word) {
  {
    MutexLock lock(&mu_);
    if (auto* late = std::get_if<membership::Late>(&word)) late->epoch = view_.epoch;
    Remember(word);
  }
  Tell(Control::MEMBERS, membership::Pack(word));
}

}  // namespace ps
