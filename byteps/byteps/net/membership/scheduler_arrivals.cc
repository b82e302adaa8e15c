// Nodes that come to the scheduler: which are admitted, and what they are told.
#include <algorithm>
#include <climits>
#include <map>
#include <string>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/link/nics.h"
#include "byteps/net/membership/scheduler_membership.h"
#include "ps/internal/postoffice.h"

namespace ps {

using membership::Account;
using membership::Claim;
using membership::kProtocol;
using membership::Send;

void SchedulerMembership::Register(const Message& msg) {
  if (msg.meta.control.node.size() != 1) return;
  Node node = msg.meta.control.node[0];
  Claim claim;
  // Another protocol may say something else than this one.
  if (!ParseClaim(msg.meta.body, &claim) && claim.protocol == kProtocol) claim.protocol = -1;
  Account account;
  if (!ParseAccount(msg.meta.body, &account)) claim.protocol = -1;
  if (account.life > 0) return Return(node, claim, account);
  if (claim.probe > 0) return AnswerProbe(node, claim);
  Refusal refusal;
  int incarnation = 0;
  {
    MutexLock lock(&mu_);
    if (state_ == State::kStopped) return;
    incarnation = incarnation_;
    refusal = WhyClosed();
    if (!refusal) refusal = Assign(roster_, replicas_, settings_, claim, &node);
    if (!refusal && node.role == Node::SERVER) AssignVacancy(&node);
  }
  if (refusal) return Refuse(node, refusal);
  // It has a link before it is a peer: whoever is told of a failure can be told.
  links_->Connect(node);
  Gathered gathered;
  {
    MutexLock lock(&mu_);
    if (state_ == State::kStopped) return;
    if (incarnation == incarnation_ && state_ == State::kActive) {
      gathered = Admit(claim, node);
    } else {
      refusal = {"the job has failed: " + failure_, state_ != State::kFailed};
    }
  }
  if (refusal) return Refuse(node, refusal);
  int life = 0;
  {
    MutexLock lock(&mu_);
    life = takeover_.life;
  }
  Send(links_, Control::WELCOME, node.id, membership::PackWelcome(incarnation, life), {node});
  PS_VLOG(1) << "admitted " << Describe(node);
  EmitProgress(MembershipEvent::kAdmitted, node);
  if (gathered.replaces) return ReplaceServer(node);
  if (!gathered.all) return;
  std::string unreachable;
  {
    MutexLock lock(&mu_);
    unreachable = UnreachableServer();
  }
  if (!unreachable.empty()) return FailJob(unreachable);
  AdmitAll(gathered.replica);
  if (gathered.replica >= 0) return TellReplicas("");
  EmitProgress(MembershipEvent::kComplete, node);
}

SchedulerMembership::Refusal SchedulerMembership::WhyClosed() {
  if (state_ == State::kActive && takeover_.gathers) {
    return {"it goes on with a job whose nodes have not all come back yet", true};
  }
  if (state_ == State::kActive) return {};
  if (state_ == State::kTurning) PS_PROBE(kCameWhileTurning);
  if (state_ != State::kFailed && state_ != State::kTurning) return {"the job has ended"};
  return {"the job has failed: " + failure_, state_ == State::kTurning};
}

SchedulerMembership::Gathered SchedulerMembership::Admit(const Claim& claim, const Node& node) {
  const Member* const before = roster_.Find(node.id);
  BPS_INVARIANT("a place in the job is one node's", before == nullptr || before->removed,
                "that of " + Describe(node));
  JobSize expected = roster_.expected();
  if (node.role == Node::WORKER) {
    if (expected.workers < 0) expected.workers = claim.workers;
    if (expected.servers < 0) expected.servers = claim.servers;
    if (expected.replicas < 0) expected.replicas = claim.replicas;
    roster_.Expect(expected);
    any_worker_ = true;
  }
  const bool late = before != nullptr;
  roster_.Erase(node.id);
  Member* const member = roster_.Put(node);
  member->heard = last_arrival_ = Clock::now();
  member->link_mbps = claim.link_mbps;
  if (vacancies_.erase(node.id) > 0) {
    last_replaced_ = member->heard;
    ++turns_[Postoffice::IDtoRank(node.id)];
    return {.replaces = true};
  }
  if (late) {
    Gathered gathered{true, replicas_.Of(Postoffice::IDtoRank(node.id))};
    replicas_.Arrive(gathered.replica, member->heard);
    for (const auto& [id, other] : roster_.members()) {
      const bool same = other.node.role == Node::WORKER &&
                        replicas_.Of(Postoffice::IDtoRank(id)) == gathered.replica;
      if (same && other.removed) gathered.all = false;
    }
    return gathered;
  }
  if (!roster_.IsComplete()) return {};
  failure_.clear();  // of the last generation
  replicas_.Begin(std::max(expected.replicas, 1), expected.workers);
  return {true, -1};
}

std::string SchedulerMembership::UnreachableServer() {
  const Member* server = nullptr;
  std::map<std::string, const Member*> workers;  // by address
  for (const auto& [id, member] : roster_.members()) {
    const std::string& host = member.node.hostname;
    if (member.node.role == Node::WORKER) workers.emplace(host, &member);
    if (member.node.role == Node::SERVER && IsLoopback(host)) server = &member;
  }
  if (server == nullptr) return "";
  for (const auto& [host, worker] : workers) {
    // Where the scheduler runs there are the server, and workers that reach it.
    if (IsLoopback(host) || !IsNumeric(host) || !InterfaceOf(host).empty()) continue;
    return Describe(server->node) + " listens at a loopback address, which " +
           Describe(worker->node) +
           " cannot reach: the scheduler's name stands for it on that server's machine; set "
           "DMLC_NODE_HOST there to an address of the machine";
  }
  return "";
}

std::string SchedulerMembership::BeginningOf(bool late) {
  membership::Beginning beginning{INT_MAX, late, turns_};
  for (const auto& [id, member] : roster_.members()) {
    if (member.node.role != Node::WORKER) continue;
    beginning.link_mbps = std::min(beginning.link_mbps, member.link_mbps);
  }
  for (const auto& [id, vacancy] : vacancies_) --beginning.turns[Postoffice::IDtoRank(id)];
  return membership::PackBeginning(beginning);
}

std::vector<Node> SchedulerMembership::SelfIfOnSeveralNics() const {
  std::vector<Node> self;
  if (links_->self().nics.size() > 1) self.push_back(links_->self());
  return self;
}

void SchedulerMembership::AdmitAll(int replica) {
  // Workers connect to servers, and with backups neighbors among servers to each other: nobody else
  // needs addresses.  All may have to connect to the scheduler again, over another NIC.
  const std::vector<Node> scheduler = SelfIfOnSeveralNics();
  std::vector<Node> servers = scheduler;
  std::vector<Node> everyone;
  std::map<int, std::vector<Node>> neighbors;
  std::vector<std::string> lost;
  std::string beginning, replicas;
  MutexLock telling(&telling_mu_);
  {
    MutexLock lock(&mu_);
    for (const auto& [id, member] : roster_.members()) {
      const int rank = Postoffice::IDtoRank(id);
      const bool worker = member.node.role == Node::WORKER;
      if (replica < 0 || (worker && replicas_.Of(rank) == replica)) everyone.push_back(member.node);
      if (worker) continue;
      servers.push_back(member.node);
      neighbors[id] = NeighborsOf(id);
    }
    lost = LostWords();
    beginning = BeginningOf(replica >= 0);
    // So that servers alone can tell the next scheduler that there are replicas: workers may all
    // have left, or be lost.
    const bool returns = replica < 0 && settings_.scheduler_return_s > 0;
    if (returns && replicas_.active()) replicas = membership::PackReplicas(replicas_.View(true));
  }
  for (const Node& node : everyone) {
    const bool worker = node.role == Node::WORKER;
    std::vector<Node> told = worker ? servers : scheduler;
    if (!worker) told.insert(told.end(), neighbors[node.id].begin(), neighbors[node.id].end());
    Send(links_, Control::ADD_NODE, node.id, beginning, told);
    for (const std::string& word : lost) Send(links_, Control::MEMBERS, node.id, word);
    if (!worker && !replicas.empty()) Send(links_, Control::MEMBERS, node.id, replicas);
  }
}

void SchedulerMembership::Refuse(const Node& node, const Refusal& refusal) {
  const std::string reason = Describe(node) + " was refused by " + Name() + ": " + refusal.reason;
  // Who comes again and again must not fill the log.
  if (refusal.later) {
    PS_VLOG(1) << reason << "; it may come again";
  } else {
    BPS_LOG(WARNING) << reason;
  }
  SendAway(node, (refusal.later ? membership::kAgain : "") + reason);
}

void SchedulerMembership::SendAway(const Node& node, const std::string& body) {
  Node target = node;
  {
    MutexLock lock(&mu_);
    target.id = kRefusedBase + refused_++;
  }
  links_->Connect(target);
  Send(links_, Control::REFUSED, target.id, body);
  links_->Disconnect(target.id);
}

void SchedulerMembership::AnswerProbe(const Node& node, const Claim& claim) {
  Refusal refusal;
  std::string counts;
  {
    MutexLock lock(&mu_);
    refusal = WhyClosed();
    if (!refusal) refusal = AssignAll(roster_, replicas_, settings_, claim, node);
    const auto of = [](int there, int expected, const char* noun) {
      return expected < 0 ? Plural(there, noun)
                          : std::to_string(there) + " of " + Plural(expected, noun);
    };
    counts = of(roster_.Count(Node::SERVER), roster_.expected().servers, "server") + " and " +
             of(roster_.Count(Node::WORKER), roster_.expected().workers, "worker");
  }
  PS_VLOG(1) << Describe(node)
             << " asked whether it would be admitted: " << (refusal ? refusal.reason : "yes");
  if (!refusal) return SendAway(node, membership::kWould + counts + " are there");
  SendAway(node, (refusal.later ? membership::kAgain : "") + Describe(node) +
                     " would be refused by " + Name() + ": " + refusal.reason + " (" + counts +
                     " are there)");
}

}  // namespace ps
