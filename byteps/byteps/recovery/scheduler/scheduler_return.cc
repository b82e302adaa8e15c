// A scheduler that goes on with the job of one that died, from what nodes tell it
// (docs/design/losses.md).
#include <algorithm>
#include <climits>
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

using membership::Account;
using membership::Claim;
using membership::Send;

namespace {

// Of which this scheduler knows the place alone.
Node Unknown(int id) {
  Node node;
  node.id = id;
  node.role = id % 2 != 0 ? Node::WORKER : Node::SERVER;
  node.aux_id = node.role == Node::WORKER ? Postoffice::IDtoRank(id) : -1;
  node.hostname = "unknown";
  node.port = 0;
  return node;
}

}  // namespace

void SchedulerMembership::Return(const Node& node, const Claim& claim, const Account& account) {
  PS_PROBE(kNodeReturns);
  std::vector<Node> aside;  // that have to give way
  std::string replicas;
  std::vector<ServerWord> words;
  Refusal refusal = CheckReturn(settings_, claim, account, node);
  {
    MutexLock lock(&mu_);
    if (state_ == State::kStopped) return;
    if (!refusal) refusal = WhyNoReturn(node, claim, account);
    if (!refusal) aside = MakeRoom(node, account);
  }
  for (const Node& other : aside) {
    SendAway(other, membership::kAgain + Describe(other) +
                        " came before the nodes of the job that " + Name() + " goes on with");
  }
  if (refusal) return Refuse(node, refusal);
  links_->Connect(node);
  int incarnation = 0, life = 0;
  {
    MutexLock lock(&mu_);
    if (state_ != State::kActive) return;
    Member* const member = roster_.Put(node);
    member->left = false;  // it will say so again
    member->heard = Clock::now();
    member->link_mbps = claim.link_mbps;
    incarnation = incarnation_;
    if (takeover_.gathers) {
      takeover_.life = std::max(takeover_.life, account.life + 1);
      const int told = account.replicas.count();  // of a server, which claims none
      takeover_.size.replicas = std::max({takeover_.size.replicas, claim.replicas, told});
      takeover_.accounts.Expect(takeover_.size);
      takeover_.accounts.Put(node.id, account);
    } else {
      const bool server = node.role == Node::SERVER;
      if (replicas_.active()) replicas = membership::PackReplicas(replicas_.View(server));
      words = ServerWords();
    }
    life = takeover_.life;
  }
  Send(links_, Control::WELCOME, node.id, membership::PackWelcome(incarnation, life), {node});
  if (!replicas.empty()) Send(links_, Control::MEMBERS, node.id, replicas);
  for (const auto& [server, text, nodes] : words) {
    if (server != node.id) Send(links_, Control::MEMBERS, node.id, text, nodes);
  }
  EmitProgress(MembershipEvent::kAdmitted, node);
  GoOn(false);
}

SchedulerMembership::Refusal SchedulerMembership::WhyNoReturn(const Node& node, const Claim& claim,
                                                              const Account& account) {
  if (state_ != State::kActive) return WhyClosed();
  const bool has_begun = replicas_.count() > 0;
  if ((has_begun || takeover_.gathers) && account.job != links_->job()) {
    return {"it is in another job than the one that this scheduler goes on with"};
  }
  const Member* const member = roster_.Find(node.id);
  if (takeover_.gathers) {
    const int replicas = takeover_.size.replicas;
    if (node.role == Node::WORKER && replicas > 0 && claim.replicas != replicas) {
      return {"it is of a job of " + Plural(claim.replicas, "replica") + ", the others of " +
              Plural(replicas, "replica") + " (worker.sh --replica, BYTEPS_REPLICA)"};
    }
    const Account* const other = takeover_.accounts.Find(node.id);
    if (other == nullptr) return {};
    const int rank = Postoffice::IDtoRank(node.id);
    const bool newer = node.role == Node::SERVER ? membership::TurnOf(account.turns, rank) >=
                                                       membership::TurnOf(other->turns, rank)
                                                 : account.replicas.epoch >= other->replicas.epoch;
    if (newer) return {};
    return {"another process has its place in the job"};
  }
  if (!has_begun) return {};
  if (account.life > takeover_.life) {
    return {"another scheduler, which began later, has the job"};
  }
  if (member == nullptr) return {"the job goes on without it"};
  if (member->removed) return {"its replica was removed, and the others go on"};
  if (member->left || TokenOf(member->node) == TokenOf(node)) return {};
  return {"another process has its place in the job"};
}

std::vector<Node> SchedulerMembership::MakeRoom(const Node& node, const Account& account) {
  std::vector<Node> aside;
  if (replicas_.count() > 0) return aside;
  if (takeover_.gathers) {
    // An earlier life of it, which the scheduler before had sent away.
    const Member* const member = roster_.Find(node.id);
    if (member != nullptr && TokenOf(member->node) != TokenOf(node)) aside.push_back(member->node);
    return aside;
  }
  BPS_LOG(WARNING) << Describe(node) << " is in a job that another scheduler began: "
                   << "waiting for its other nodes, to go on with it";
  for (const auto& [id, member] : roster_.members()) aside.push_back(member.node);
  if (!aside.empty()) PS_PROBE(kNewcomersGiveWay);
  roster_.Clear();
  any_worker_ = false;
  takeover_.gathers = true;
  takeover_.since = Clock::now();
  takeover_.size = {settings_.workers, settings_.servers, 0};
  incarnation_ = static_cast<int>(account.job & kIncarnationMask);
  last_incarnation_ = incarnation_;
  links_->SetJob(account.job);
  return aside;
}

bool SchedulerMembership::HoldBack(const Message& msg) {
  if (!takeover_.gathers || msg.meta.control.cmd == Control::HEARTBEAT) return false;
  takeover_.held.push_back(msg);
  return true;
}

void SchedulerMembership::GoOn(bool late) {
  std::vector<Node> strays, leavers;
  std::vector<int> missing;
  std::vector<Message> held;
  bool over = false;
  {
    MutexLock lock(&mu_);
    if (!takeover_.gathers || state_ != State::kActive) return;
    missing = takeover_.accounts.Missing();
    if (!missing.empty() && !late) return;
    PS_PROBE(kSchedulerGoesOn);
    takeover_.gathers = false;
    held.swap(takeover_.held);
    strays = Rebuild(missing);
    takeover_.accounts = {};
    over = IsOver();
    if (!over) leavers = TakeLeavers(held, missing);
    over = over || !leavers.empty();
  }
  BPS_LOG(WARNING) << Name() << " goes on with the job of another one that died";
  for (const Node& node : strays) {
    const bool server = node.role == Node::SERVER;
    Send(links_, Control::JOB_FAILED, node.id,
         Describe(node) + " cannot go on: " +
             (server ? "it was lost to the job, and another server may have its place"
                     : "its replica was removed"));
    links_->Disconnect(node.id);
  }
  TellServers();
  TellReplicas("");
  for (const Node& node : leavers) Send(links_, Control::NODE_LEFT, node.id, "", {node});
  if (over) return EndJob();  // those that have not come may have heard so
  EmitProgress(MembershipEvent::kComplete, links_->self());
  for (const int id : missing) {
    OnGone(id, "did not come back to " + Name() + " within " +
                   Limit(settings_.scheduler_return_s, "BYTEPS_SCHEDULER_RETURN_S"));
  }
  // Workers' first: a server that most of them have lost may say that it has lost them.
  std::stable_partition(held.begin(), held.end(),
                        [](const Message& msg) { return IsWorkerId(msg.meta.sender); });
  for (const Message& msg : held) Handle(msg);
  heartbeats_.Wake();
}

std::vector<Node> SchedulerMembership::TakeLeavers(const std::vector<Message>& held,
                                                   const std::vector<int>& missing) {
  const std::set<int> away(missing.begin(), missing.end());
  const std::vector<int> servers = roster_.Ids(Node::SERVER);
  // Those that were told that the job is over do not come, nor tell which workers have left.
  const bool no_server =
      std::all_of(servers.begin(), servers.end(), [&](int id) { return away.count(id) > 0; });
  std::set<int> saying;
  for (const Message& msg : held) {
    if (msg.meta.control.cmd != Control::LEAVE) continue;
    const auto departure = membership::ParseFarewell(msg.meta.body, settings_.keep);
    if (departure.failure.empty() && !departure.suspend) saying.insert(msg.meta.sender);
  }
  std::vector<Node> leavers;
  for (const auto& [id, member] : roster_.members()) {
    if (member.node.role != Node::WORKER || member.left) continue;
    if (no_server && away.count(id) > 0) continue;
    if (saying.count(id) == 0) return {};
    leavers.push_back(member.node);
  }
  for (const Node& node : leavers) roster_.Find(node.id)->left = true;
  return leavers;
}

std::vector<Node> SchedulerMembership::Rebuild(const std::vector<int>& missing) {
  using ReplicaState = ReplicaTable::State;
  const auto now = Clock::now();
  const membership::Accounts& accounts = takeover_.accounts;
  JobSize size = takeover_.size;
  size.replicas = std::max(size.replicas, 1);
  roster_.Expect(size);
  any_worker_ = true;
  last_arrival_ = now;
  const auto past = accounts.Replicas();
  replicas_.Restore(past, size.workers, accounts.NewestEpoch() + 1, now);
  for (const ReplicaTable::Past& one : past) {
    if (one.state == ReplicaState::kLeaving) PS_PROBE(kTakesOverLeaving);
    if (one.state == ReplicaState::kGathering) PS_PROBE(kTakesOverGathering);
    if (one.state == ReplicaState::kWaiting) PS_PROBE(kTakesOverWaiting);
    if (one.state == ReplicaState::kJoining) PS_PROBE(kTakesOverJoining);
  }
  std::vector<Node> strays;
  const auto put = [&](int id) PS_REQUIRES(mu_) {
    Member* const member = roster_.Put(Unknown(id));
    member->heard = now;
    member->link_mbps = INT_MAX;  // it says nothing of the slowest
    return member;
  };
  const std::set<int> left = accounts.Left();
  if (!left.empty()) PS_PROBE(kTakesOverLeft);
  for (int rank = 0; rank < size.workers; ++rank) {
    const int id = IdOf(Node::WORKER, rank);
    const ReplicaTable::Past& replica = past[replicas_.Of(rank)];
    if (accounts.IsOf(rank, replica)) continue;
    const Member* const other = roster_.Find(id);
    if (other != nullptr) strays.push_back(other->node);
    Member* const member = put(id);
    if (other != nullptr) member->node = strays.back();
    if (replica.state == ReplicaState::kLeaving || replica.state == ReplicaState::kGathering) {
      member->left = member->removed = true;
      // Where others of it gather, all servers have dropped the last ones.
      if (replica.state == ReplicaState::kLeaving) removed_.push_back(member->node);
    } else if (left.count(rank) > 0) {
      member->left = true;
      Depart(member->node);
    }
  }
  RebuildServers(&strays);
  for (const int id : missing) {
    if (roster_.Find(id) == nullptr) put(id);
  }
  if (!missing.empty()) PS_PROBE(kNodeStaysAway);
  return strays;
}

void SchedulerMembership::RebuildServers(std::vector<Node>* strays) {
  turns_ = takeover_.accounts.NewestTurns();
  const int servers = roster_.expected().servers;
  std::erase_if(turns_, [&](const auto& entry) { return entry.first >= servers; });
  last_replaced_ = Clock::now();  // what is given again needs the workers that have left
  for (int rank = 0; rank < servers; ++rank) {
    const int id = IdOf(Node::SERVER, rank);
    const Member* const member = roster_.Find(id);
    if (member != nullptr && !takeover_.accounts.HasPlace(rank)) {
      strays->push_back(member->node);
      roster_.Erase(id);
    }
    if (!membership::IsVacant(turns_, rank)) continue;
    PS_PROBE(kTakesOverVacancy);
    vacancies_[id] = {Clock::now(), RoleAndRank(id) + " was lost before " + Name() + " was"};
  }
}

void SchedulerMembership::TellServers() {
  MutexLock telling(&telling_mu_);
  std::vector<ServerWord> words;
  std::map<int, std::vector<int>> told;  // by the server
  {
    MutexLock lock(&mu_);
    if (state_ != State::kActive) return;
    words = ServerWords();
    for (const ServerWord& word : words) told[word.server] = ToTellOfServers(word.server);
  }
  for (const auto& [server, text, nodes] : words) {
    for (const int id : told[server]) Send(links_, Control::MEMBERS, id, text, nodes);
  }
}

void SchedulerMembership::AskServers(const Node& leaver) {
  departures_.asked[leaver.id] = {leaver, {}};
  Depart(leaver);
}

void SchedulerMembership::OnLeftKnown(int server, int rank) {
  {
    MutexLock lock(&mu_);
    const auto asked = departures_.asked.find(IdOf(Node::WORKER, rank));
    if (asked == departures_.asked.end()) return;
    asked->second.known.insert(server);
  }
  LetKnownGo();
}

void SchedulerMembership::ForgetKnown(int server) {
  for (auto& [id, leaver] : departures_.asked) leaver.known.erase(server);
}

void SchedulerMembership::LetKnownGo() {
  std::vector<Node> gone;
  bool over = false;
  {
    MutexLock lock(&mu_);
    // Who takes a vacant place will be asked, unless there is nothing to do for it.
    if (state_ != State::kActive || (!vacancies_.empty() && !HaveAllLeft())) return;
    const std::vector<int> servers = roster_.Ids(Node::SERVER);
    std::erase_if(departures_.asked, [&](const auto& entry) {
      const auto& [node, known] = entry.second;
      const auto knows = [&](int id) { return known.count(id) > 0; };
      if (!std::all_of(servers.begin(), servers.end(), knows)) return false;
      gone.push_back(node);
      return true;
    });
    if (gone.empty()) return;
    over = IsOver();
  }
  for (const Node& node : gone) Send(links_, Control::NODE_LEFT, node.id, "", {node});
  if (!over) return;
  PS_PROBE(kLastLeaves);
  EndJob();
}

}  // namespace ps
