// Servers that are lost while the job goes on, and others that take their places
// (docs/design/losses.md): what the scheduler does of it.
#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/membership/scheduler_membership.h"
#include "ps/internal/postoffice.h"

namespace ps {

using membership::MemberWord;
using membership::Send;

namespace {

// So long a worker that has done its work stays for others, in which the loss of a server is seen.
constexpr double kLingerSeconds = 5;

}  // namespace

std::string membership::LostWord(int server, int turn, const std::string& reason) {
  return PackWord({MemberWord::kServerLost, Postoffice::IDtoRank(server), 0, reason, turn});
}

bool SchedulerMembership::LoseServer(int node_id, const std::string& reason) {
  std::vector<int> told;
  Node lost;
  int turn = 0;
  MutexLock telling(&telling_mu_);
  {
    MutexLock lock(&mu_);
    Member* const member = roster_.Find(node_id);
    const bool has_begun = replicas_.count() > 0;
    if (settings_.replace_servers_s <= 0 || state_ != State::kActive || !has_begun) return false;
    if (member == nullptr) return vacancies_.count(node_id) > 0;
    if (member->node.role != Node::SERVER) return false;
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
    turn = ++turns_[Postoffice::IDtoRank(node_id)];
    roster_.Erase(node_id);
    ForgetKnown(node_id);
    trials_.accusations.erase(node_id);
    trials_.broken_links.erase(node_id);
    std::erase_if(trials_.accusations,
                  [=](const auto& one) { return one.second.accuser == node_id; });
    replicas_.Forget(node_id);
    told = ToTellOfServers(node_id);
  }
  BPS_LOG(WARNING) << reason << "; another server has "
                   << Limit(settings_.replace_servers_s, "BYTEPS_REPLACE_SERVERS_S")
                   << " to take its place";
  const std::string word = membership::LostWord(node_id, turn, reason);
  for (const int id : told) Send(links_, Control::MEMBERS, id, word);
  EmitServer(MembershipEvent::kServerLost, lost, reason);
  return true;
}

void SchedulerMembership::ReplaceServer(const Node& node) {
  PS_PROBE(kServerReplaced);
  std::vector<Node> left;
  std::vector<int> told;
  std::vector<std::string> lost;
  std::vector<Node> peers = SelfIfOnSeveralNics();
  int servers = 0, turn = 0;
  std::string beginning, replicas;
  MutexLock telling(&telling_mu_);
  {
    MutexLock lock(&mu_);
    if (roster_.Find(node.id) == nullptr) return;  // it is lost already
    for (const auto& [id, member] : roster_.members()) {
      const bool worker = member.node.role == Node::WORKER;
      if (worker && member.left && !member.removed && !member.lingers) left.push_back(member.node);
    }
    beginning = BeginningOf(false);
    turn = turns_[Postoffice::IDtoRank(node.id)];
    if (replicas_.active()) replicas = membership::PackReplicas(replicas_.View(true));
    told = ToTellOfServers(node.id);
    const std::vector<Node> neighbors = NeighborsOf(node.id);
    peers.insert(peers.end(), neighbors.begin(), neighbors.end());
    lost = LostWords();
    servers = roster_.expected().servers;
  }
  Send(links_, Control::ADD_NODE, node.id, beginning, peers);
  for (const std::string& word : lost) Send(links_, Control::MEMBERS, node.id, word);
  if (!left.empty()) Send(links_, Control::NODE_LEFT, node.id, "", left);
  if (!replicas.empty()) Send(links_, Control::MEMBERS, node.id, replicas);
  BPS_LOG(INFO) << Describe(node) << " has taken the place of the server that was lost";
  const std::string word = membership::PackWord(
      {MemberWord::kServerReplaced, Postoffice::IDtoRank(node.id), servers, "", turn});
  for (const int id : told) Send(links_, Control::MEMBERS, id, word, {node});
  EmitServer(MembershipEvent::kServerReplaced, node, "");
}

void SchedulerMembership::AssignVacancy(Node* server) {
  const auto oldest = std::min_element(
      vacancies_.begin(), vacancies_.end(),
      [](const auto& a, const auto& b) { return a.second.since < b.second.since; });
  if (oldest != vacancies_.end()) server->id = oldest->first;
}

std::vector<int> SchedulerMembership::ToTellOfServers(int server) {
  std::vector<int> told;
  for (const auto& [id, member] : roster_.members()) {
    const bool is_there = !member.left || (member.lingers && !member.removed);
    if (id != server && is_there) told.push_back(id);
  }
  return told;
}

std::vector<std::string> SchedulerMembership::LostWords() {
  std::vector<std::string> words;
  for (const auto& [id, vacancy] : vacancies_) {
    words.push_back(membership::LostWord(id, turns_[Postoffice::IDtoRank(id)], vacancy.reason));
  }
  return words;
}

std::vector<SchedulerMembership::ServerWord> SchedulerMembership::ServerWords() {
  std::vector<ServerWord> words;
  for (const auto& [rank, turn] : turns_) {
    const int id = IdOf(Node::SERVER, rank);
    if (const auto vacancy = vacancies_.find(id); vacancy != vacancies_.end()) {
      words.push_back({id, membership::LostWord(id, turn, vacancy->second.reason), {}});
      continue;
    }
    const Member* const member = roster_.Find(id);
    if (member == nullptr || member->node.port == 0) continue;  // it has not come back yet
    const MemberWord word{MemberWord::kServerReplaced, rank, roster_.expected().servers, "", turn};
    words.push_back({id, membership::PackWord(word), {member->node}});
  }
  return words;
}

std::vector<Node> SchedulerMembership::NeighborsOf(int server) {
  std::vector<Node> neighbors;
  if (!settings_.backups) return neighbors;
  const int servers = roster_.expected().servers;
  const int rank = Postoffice::IDtoRank(server);
  for (const int near : std::set<int>{(rank + servers - 1) % servers, (rank + 1) % servers}) {
    const Member* const member = roster_.Find(IdOf(Node::SERVER, near));
    const bool is_there = member != nullptr && !member->removed;
    if (is_there && AreNeighbors(rank, near, servers)) neighbors.push_back(member->node);
  }
  return neighbors;
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
  const bool asks = settings_.scheduler_return_s > 0;
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
      asks ? AskServers(node) : Depart(node);
    }
  }
  if (asks) return;  // they go when all servers know
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

std::string SchedulerMembership::ReasonNotToReplace(Clock::time_point now) {
  const double limit = settings_.replace_servers_s;
  for (const auto& [id, vacancy] : vacancies_) {
    if (now - vacancy.since < ToDuration(limit)) continue;
    return vacancy.reason + "; no other server took its place within " +
           Limit(limit, "BYTEPS_REPLACE_SERVERS_S");
  }
  return "";
}

// Replicas that are removed and come back: what the scheduler does of it (docs/design/replicas.md).

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
