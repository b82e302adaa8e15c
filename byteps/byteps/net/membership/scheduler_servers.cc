// Servers that are lost while the job goes on, and others that take their places
// (docs/design/replicas.md): what the scheduler does of it.
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

using membership::MemberWord;
using membership::Send;

namespace {

// How long a server has to be heard of after a worker has said that their link broke.  Less than
// the worker waits for the verdict.
constexpr double kTrialSeconds = 4;
// So long a worker that has done its work stays for others, in which the loss of a server is seen.
constexpr double kLingerSeconds = 5;

std::string Word(MemberWord::Kind kind, int server, const std::string& text) {
  return membership::PackWord({kind, Postoffice::IDtoRank(server), 0, text});
}

}  // namespace

std::string membership::LostWord(int server, const std::string& reason) {
  return Word(MemberWord::kServerLost, server, reason);
}

bool SchedulerMembership::LoseServer(int node_id, const std::string& reason) {
  std::vector<int> workers;
  Node lost;
  MutexLock telling(&telling_mu_);
  {
    MutexLock lock(&mu_);
    Member* const member = roster_.Find(node_id);
    const bool has_begun = replicas_.count() > 0;
    if (settings_.replace_servers_s <= 0 || state_ != State::kActive || !has_begun ||
        member == nullptr || member->node.role != Node::SERVER) {
      return false;
    }
    if (member->removed) return true;
    PS_PROBE(kServerLost);
    lost = member->node;
    member->left = member->removed = true;  // nobody has its place yet
  }
  // Should it be there after all, it must hear of that before another one has its name.
  Send(links_, Control::JOB_FAILED, node_id, reason);
  links_->Disconnect(node_id);
  {
    MutexLock lock(&mu_);
    if (state_ != State::kActive) return true;
    vacancies_[node_id] = {Clock::now(), reason};
    roster_.Erase(node_id);
    accusations_.erase(node_id);
    replicas_.Forget(node_id);
    workers = WorkersToTell();
  }
  BPS_LOG(WARNING) << reason << "; another server has "
                   << Limit(settings_.replace_servers_s, "BYTEPS_REPLACE_SERVERS_S")
                   << " to take its place";
  const std::string word = membership::LostWord(node_id, reason);
  for (const int id : workers) Send(links_, Control::MEMBERS, id, word);
  EmitServer(MembershipEvent::kServerLost, lost, reason);
  return true;
}

void SchedulerMembership::ReplaceServer(const Node& node) {
  PS_PROBE(kServerReplaced);
  std::vector<Node> left;
  std::vector<int> workers;
  std::string link, replicas;
  MutexLock telling(&telling_mu_);
  {
    MutexLock lock(&mu_);
    if (roster_.Find(node.id) == nullptr) return;  // it is lost already
    for (const auto& [id, member] : roster_.members()) {
      const bool worker = member.node.role == Node::WORKER;
      if (worker && member.left && !member.removed && !member.lingers) left.push_back(member.node);
    }
    link = LinkOfAll(false);
    if (replicas_.active()) replicas = membership::PackReplicas(replicas_.View(true));
    workers = WorkersToTell();
  }
  Send(links_, Control::ADD_NODE, node.id, link, SelfIfOnSeveralNics());
  if (!left.empty()) Send(links_, Control::NODE_LEFT, node.id, "", left);
  if (!replicas.empty()) Send(links_, Control::MEMBERS, node.id, replicas);
  BPS_LOG(INFO) << Describe(node) << " has taken the place of the server that was lost";
  const std::string word = Word(MemberWord::kServerReplaced, node.id, "");
  for (const int id : workers) Send(links_, Control::MEMBERS, id, word, {node});
  EmitServer(MembershipEvent::kServerReplaced, node, "");
}

std::vector<int> SchedulerMembership::WorkersToTell() {
  std::vector<int> workers;
  for (const auto& [id, member] : roster_.members()) {
    const bool is_there = !member.left || (member.lingers && !member.removed);
    if (member.node.role == Node::WORKER && is_there) workers.push_back(id);
  }
  return workers;
}

void SchedulerMembership::EmitServer(MembershipEvent::Kind kind, const Node& node,
                                     const std::string& reason) {
  MembershipEvent event;
  event.kind = kind;
  event.rank = Postoffice::IDtoRank(node.id);
  event.node = InfoOf(node);
  event.reason = reason;
  announcer_.Tell(event);
}

void SchedulerMembership::LetGo(Clock::time_point now) {
  std::vector<Node> gone;
  {
    MutexLock lock(&mu_);
    if (!vacancies_.empty()) return;  // the sums that they have may be wanted
    for (const auto& [id, member] : roster_.members()) {
      if (!member.lingers || member.removed) continue;
      if (now - std::max(member.left_at, last_replaced_) < ToDuration(kLingerSeconds)) continue;
      gone.push_back(member.node);
    }
    for (const Node& node : gone) {
      roster_.Find(node.id)->lingers = false;
      Depart(node);
    }
  }
  for (const Node& node : gone) Send(links_, Control::NODE_LEFT, node.id, "", {node});
}

bool SchedulerMembership::LoseLeaver(int node_id) {
  {
    MutexLock lock(&mu_);
    Member* const member = roster_.Find(node_id);
    if (member == nullptr || !std::exchange(member->lingers, false)) return false;
    Depart(member->node);
  }
  heartbeats_.Wake();
  return true;
}

bool SchedulerMembership::AccuseServer(int worker, const Node& server, const std::string& reason) {
  if (settings_.replace_servers_s <= 0) return false;
  {
    MutexLock lock(&mu_);
    const Member* const member = roster_.Find(server.id);
    if (member == nullptr || member->removed) return vacancies_.count(server.id) > 0;
    // Another one has its place already.
    const bool same = member->node.hostname == server.hostname && member->node.port == server.port;
    if (!same) return true;
    if (replicas_.active()) {
      accusations_.emplace(server.id,
                           Accusation{worker, reason, Clock::now() + ToDuration(kTrialSeconds)});
      lock.Unlock();
      heartbeats_.Wake();
      return true;
    }
  }
  // Without that worker there is no job, without the server there may be.
  return LoseServer(server.id, reason);
}

void SchedulerMembership::Acquit(int server) {
  std::vector<Accusation> false_ones;
  {
    MutexLock lock(&mu_);
    const auto [begin, end] = accusations_.equal_range(server);
    if (begin == end) return;
    for (auto it = begin; it != end; ++it) false_ones.push_back(it->second);
    accusations_.erase(begin, end);
  }
  for (const Accusation& one : false_ones) {
    if (!LoseReplica(one.worker, one.reason) && !LoseServer(server, one.reason)) {
      FailJob(one.reason);
    }
  }
}

void SchedulerMembership::Condemn(Clock::time_point now) {
  std::map<int, std::string> gone;
  {
    MutexLock lock(&mu_);
    std::erase_if(accusations_, [&](const auto& entry) {
      if (now < entry.second.due) return false;
      gone[entry.first] = entry.second.reason;
      return true;
    });
  }
  for (const auto& [server, reason] : gone) {
    if (!LoseServer(server, reason)) FailJob(reason);
  }
}

std::string SchedulerMembership::ReasonNotToReplace(Clock::time_point now) {
  const double limit = settings_.replace_servers_s;
  for (const auto& [id, vacancy] : vacancies_) {
    if (now - vacancy.since < ToDuration(limit)) continue;
    return vacancy.reason + "; no other server took its place within " +
           Limit(limit, "BYTEPS_REPLACE_SERVERS_S");
  }
  return "";
}

}  // namespace ps
