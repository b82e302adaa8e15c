// Replicas that are removed and come back: what the scheduler does of it (docs/design/replicas.md).
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/log.h"
#include "byteps/base/probe.h"
#include "byteps/net/link/node_text.h"
#include "byteps/net/membership/scheduler_membership.h"
#include "ps/internal/postoffice.h"

namespace ps {

using membership::Send;

bool SchedulerMembership::LoseReplica(int node_id, const std::string& reason) {
  std::string news;
  std::vector<int> told;
  std::vector<Node> done;  // that have done their work, and should have stayed for others
  bool over = false;
  {
    MutexLock lock(&mu_);
    const Member* const member = roster_.Find(node_id);
    if (state_ != State::kActive || !replicas_.active() || member == nullptr ||
        member->node.role != Node::WORKER) {
      return false;
    }
    if (member->removed) return true;
    const int replica = replicas_.Of(Postoffice::IDtoRank(node_id));
    if (!OthersGoOn(replica)) return false;
    PS_PROBE(kReplicaRemoved);
    if (replicas_.IsComing(replica)) PS_PROBE(kJoinerRemoved);
    replicas_.Lose(replica);
    const ReplicaView view = replicas_.View(false);
    for (int i = 0; i < replicas_.ranks(); ++i) {
      Member* const one = roster_.Find(IdOf(Node::WORKER, view.FirstRank(replica) + i));
      if (one == nullptr || one->removed) continue;
      if (!one->left) told.push_back(one->node.id);
      const bool waits = departures_.asked.erase(one->node.id) > 0;
      if (std::exchange(one->lingers, false) || waits) done.push_back(one->node);
      one->left = one->removed = true;
      removed_.push_back(one->node);
    }
    over = IsOver();
    news = "replica " + std::to_string(replica) + " was removed: " + reason;
  }
  BPS_LOG(WARNING) << news << "; the others go on";
  TellReplicas(news);
  for (const int id : told) {
    Send(links_, Control::JOB_FAILED, id, news);
    links_->Disconnect(id);
  }
  for (const Node& node : done) {
    Send(links_, Control::NODE_LEFT, node.id, "", {node});
    links_->Disconnect(node.id);
  }
  if (over) EndJob();  // another one has done all there was to do
  return true;
}

bool SchedulerMembership::OthersGoOn(int replica) {
  return std::any_of(
      roster_.members().begin(), roster_.members().end(), [&](const auto& entry) PS_REQUIRES(mu_) {
        const Member& member = entry.second;
        if (member.node.role != Node::WORKER || member.removed) return false;
        const int other = replicas_.Of(Postoffice::IDtoRank(entry.first));
        return other != replica && replicas_.state(other) == ReplicaTable::State::kPresent;
      });
}

bool SchedulerMembership::IsOver() { return departures_.asked.empty() && HaveAllLeft(); }

bool SchedulerMembership::HaveAllLeft() {
  if (takeover_.gathers) return false;
  if (!replicas_.active()) return roster_.AllWorkersLeft();
  return std::none_of(roster_.members().begin(), roster_.members().end(),
                      [&](const auto& entry) PS_REQUIRES(mu_) {
                        const Member& member = entry.second;
                        return member.node.role == Node::WORKER && !member.left &&
                               !replicas_.IsComing(replicas_.Of(Postoffice::IDtoRank(entry.first)));
                      });
}

bool SchedulerMembership::IsOfPresent(int rank) {
  const Member* const member = roster_.Find(IdOf(Node::WORKER, rank));
  return member != nullptr && !member->left &&
         replicas_.state(replicas_.Of(rank)) == ReplicaTable::State::kPresent;
}

void SchedulerMembership::TellReplicas(const std::string& news) {
  ReplicaView to_servers, to_workers;
  std::vector<int> servers, workers;
  std::vector<Node> removed;
  MutexLock telling(&telling_mu_);
  {
    MutexLock lock(&mu_);
    if (state_ != State::kActive || !replicas_.active()) return;
    removed.swap(removed_);
    to_servers = replicas_.View(true);
    to_workers = replicas_.View(false);
    to_servers.news = to_workers.news = news;
    servers = roster_.Ids(Node::SERVER);
    for (const auto& [id, member] : roster_.members()) {
      if (member.node.role == Node::WORKER && !member.left) workers.push_back(id);
    }
  }
  const std::string for_servers = membership::PackReplicas(to_servers);
  const std::string for_workers = membership::PackReplicas(to_workers);
  for (const int id : servers) Send(links_, Control::MEMBERS, id, for_servers, removed);
  for (const int id : workers) Send(links_, Control::MEMBERS, id, for_workers);
  MembershipEvent event;
  event.kind = MembershipEvent::kReplicas;
  event.replicas = to_workers;
  announcer_.Tell(event);
}

void SchedulerMembership::OnMemberWord(int sender, const std::string& text) {
  membership::MemberWord word;
  if (!membership::ParseWord(text, &word)) return;
  if (word.kind == membership::MemberWord::kLeftKnown) {
    if (sender % 2 == 0) OnLeftKnown(sender, word.number);
    return;
  }
  std::string news;
  bool changed = false;
  int passed_on = Node::kEmpty;
  int late = Node::kEmpty;
  {
    MutexLock lock(&mu_);
    const Member* const member = roster_.Find(sender);
    if (state_ != State::kActive || !replicas_.active() || member == nullptr) return;
    const bool from_server =
        word.kind != membership::MemberWord::kReady && word.kind != membership::MemberWord::kAdmit;
    if (from_server != (member->node.role == Node::SERVER)) return;
    switch (word.kind) {
      case membership::MemberWord::kAcknowledged:
        for (const int replica :
             replicas_.Acknowledge(sender, word.epoch, roster_.Ids(Node::SERVER))) {
          PS_PROBE(kReplicaJoined);
          news += (news.empty() ? "replica " : ", replica ") + std::to_string(replica);
        }
        changed = !news.empty();
        if (changed) news += " has joined";
        break;
      case membership::MemberWord::kReady:
        changed = replicas_.Ready(Postoffice::IDtoRank(sender));
        if (changed) PS_PROBE(kReplicaWaits);
        break;
      case membership::MemberWord::kAdmit:
        // One that is coming itself has no say.
        if (replicas_.IsComing(replicas_.Of(Postoffice::IDtoRank(sender)))) return;
        changed = replicas_.Admit(word.number, word.epoch);
        if (changed) PS_PROBE(kReplicaAdmitted);
        break;
      case membership::MemberWord::kAwaited:
        if (IsOfPresent(word.number)) passed_on = IdOf(Node::WORKER, word.number);
        break;
      case membership::MemberWord::kLate:
        // Of a life that was removed meanwhile others may be there.
        if (!IsOfPresent(word.number) || !replicas_.Knows(word.number, word.epoch)) return;
        late = IdOf(Node::WORKER, word.number);
        break;
      case membership::MemberWord::kServerLost:
      case membership::MemberWord::kServerReplaced:
      case membership::MemberWord::kLeftKnown:
        return;  // what it says itself
    }
  }
  if (passed_on != Node::kEmpty) Send(links_, Control::MEMBERS, passed_on, text);
  if (late != Node::kEmpty) {
    PS_PROBE(kLateRemoved);
    LoseReplica(late, word.text);
  }
  if (!changed) return;
  if (!news.empty()) BPS_LOG(INFO) << news;
  TellReplicas(news);
}

void SchedulerMembership::CheckComing(Clock::time_point now) {
  std::vector<int> late;
  {
    MutexLock lock(&mu_);
    if (!replicas_.active()) return;
    for (int replica = 0; replica < replicas_.count(); ++replica) {
      if (replicas_.state(replica) != ReplicaTable::State::kGathering) continue;
      if (now - replicas_.GathersSince(replica) <= ToDuration(settings_.start_timeout_s)) continue;
      int here = Node::kEmpty;
      bool complete = true;
      for (const auto& [id, member] : roster_.members()) {
        if (member.node.role != Node::WORKER) continue;
        if (replicas_.Of(Postoffice::IDtoRank(id)) != replica) continue;
        if (member.removed) complete = false;
        if (!member.removed) here = id;
      }
      if (!complete && here != Node::kEmpty) late.push_back(here);
    }
  }
  for (const int id : late) {
    OnGone(id, "waited for the other workers of its replica for " +
                   Limit(settings_.start_timeout_s, "BYTEPS_START_TIMEOUT_S"));
  }
}

}  // namespace ps
