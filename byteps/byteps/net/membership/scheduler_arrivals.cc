// Nodes that join the job: the scheduler admits or refuses them, and informs them.
#include <algorithm>
#include <climits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/link/nics.h"
#include "byteps/net/membership/scheduler_membership.h"
#include "ps/internal/postoffice.h"

namespace ps {

using membership::Claim;
using membership::Send;

void SchedulerMembership::Register(const Message& msg) {
  if (msg.meta.control.node.size() != 1) return;
  Node node = msg.meta.control.node[0];
  const auto [claim, account] = membership::ParseRegistration(msg.meta.body);
  if (account.scheduler_number > 0) return policy_->OnReturn(node, claim, account);
  if (claim.probe > 0) return AnswerProbe(node, claim);
  Refusal refusal;
  int generation = 0;
  {
    MutexLock lock(&job_.mu);
    if (job_.state == State::kStopped) return;
    generation = job_.generation;
    refusal = WhyClosed();
    if (!refusal) refusal = Assign(job_.roster, policy_.get(), job_.settings, claim, &node);
    if (!refusal && node.role == Node::SERVER) policy_->ChoosePlace(&node);
  }
  if (refusal) return Refuse(node, refusal);
  // The scheduler connects to the node before it makes the node a member, because every member must
  // be told of a failure.
  job_.links->Connect(node);
  bool had_begun = false, begins = false;
  int scheduler_number = 0;
  {
    MutexLock lock(&job_.mu);
    if (job_.state == State::kStopped) return;
    if (generation == job_.generation && job_.state == State::kActive) {
      had_begun = job_.has_begun;
      Admit(claim, node);
      begins = !had_begun && job_.has_begun;
    } else {
      refusal = {"the job has failed: " + failure_, job_.state != State::kFailed};
    }
    scheduler_number = job_.scheduler_number;
  }
  if (refusal) return Refuse(node, refusal);
  Send(job_.links, Control::WELCOME, node.id,
       membership::Pack(membership::Welcome{generation, scheduler_number}), {node});
  PS_VLOG(1) << "admitted " << Describe(node);
  EmitProgress(MembershipEvent::kAdmitted, node);
  if (had_begun) return policy_->OnNewcomer(node);
  if (!begins || FailIfUnreachable()) return;
  TellAll();
  policy_->OnBegun();
  EmitProgress(MembershipEvent::kComplete, node);
}

SchedulerMembership::Refusal SchedulerMembership::WhyClosed() {
  job_.AssertHeld();
  if (job_.state == State::kActive && policy_->Gathers()) {
    return {"it goes on with a job whose nodes have not all come back yet", true};
  }
  if (job_.state == State::kActive) return {};
  if (job_.state == State::kTurning) PS_PROBE(kCameWhileTurning);
  if (job_.state != State::kFailed && job_.state != State::kTurning) return {"the job has ended"};
  return {"the job has failed: " + failure_, job_.state == State::kTurning};
}

void SchedulerMembership::Admit(const Claim& claim, const Node& node) {
  const Member* const before = job_.roster.Find(node.id);
  BPS_INVARIANT("a place in the job is one node's", before == nullptr || before->removed,
                "that of " + Describe(node));
  JobSize expected = job_.roster.expected();
  if (node.role == Node::WORKER) {
    if (expected.workers < 0) expected.workers = claim.workers;
    if (expected.servers < 0) expected.servers = claim.servers;
    if (expected.replicas < 0) expected.replicas = claim.replicas;
    job_.roster.Expect(expected);
    job_.any_worker = true;
  }
  job_.roster.Erase(node.id);
  Member* const member = job_.roster.Put(node);
  member->heard = job_.last_arrival = Clock::now();
  member->link_mbps = claim.link_mbps;
  if (job_.has_begun) return policy_->OnArrival(*member);
  if (!job_.roster.IsComplete()) return;
  failure_.clear();  // the previous generation's failure
  job_.has_begun = true;
  policy_->OnComplete();
}

bool SchedulerMembership::FailIfUnreachable() {
  std::string reason;
  {
    MutexLock lock(&job_.mu);
    const Member* server = nullptr;
    std::map<std::string, const Member*> workers;  // by address
    for (const auto& [id, member] : job_.roster.members()) {
      const std::string& host = member.node.hostname;
      if (member.node.role == Node::WORKER) workers.emplace(host, &member);
      if (member.node.role == Node::SERVER && IsLoopback(host)) server = &member;
    }
    if (server == nullptr) return false;
    for (const auto& [host, worker] : workers) {
      // The worker shares the server's host, so it can reach this address.
      if (IsLoopback(host) || !IsNumeric(host) || !InterfaceOf(host).empty()) continue;
      reason = Describe(server->node) + " listens at a loopback address, which " +
               Describe(worker->node) +
               " cannot reach: the scheduler's name stands for it on that server's machine; set "
               "DMLC_NODE_HOST there to an address of the machine";
      break;
    }
  }
  if (reason.empty()) return false;
  FailJob(reason);
  return true;
}

void SchedulerMembership::TellAll() {
  std::vector<Node> everyone;
  MutexLock telling(&job_.telling_mu);
  {
    MutexLock lock(&job_.mu);
    for (const auto& [id, member] : job_.roster.members()) everyone.push_back(member.node);
  }
  TellBeginning(everyone, {});
}

void SchedulerMembership::TellBeginning(const std::vector<Node>& newcomers,
                                        membership::Beginning beginning) {
  // Workers connect to servers, and with backups neighboring servers connect to each other, so
  // nodes need only these addresses. Every node also gets the scheduler's, because it may have to
  // reconnect over another NIC.
  std::vector<Node> scheduler;
  if (job_.links->self().nics.size() > 1) scheduler.push_back(job_.links->self());
  std::vector<Node> servers = scheduler;
  std::map<int, std::vector<Node>> neighbors;
  beginning.link_mbps = INT_MAX;
  {
    MutexLock lock(&job_.mu);
    for (const auto& [id, member] : job_.roster.members()) {
      if (member.node.role == Node::SERVER) servers.push_back(member.node);
      if (member.node.role != Node::WORKER) continue;
      beginning.link_mbps = std::min(beginning.link_mbps, member.link_mbps);
    }
    for (const Node& node : newcomers) {
      if (node.role == Node::SERVER) neighbors[node.id] = NeighborsOf(node.id);
    }
  }
  const std::string text = membership::Pack(beginning);
  for (const Node& node : newcomers) {
    const bool worker = node.role == Node::WORKER;
    std::vector<Node> peers = worker ? servers : scheduler;
    if (!worker) peers.insert(peers.end(), neighbors[node.id].begin(), neighbors[node.id].end());
    Send(job_.links, Control::ADD_NODE, node.id, text, peers);
  }
}

std::vector<Node> SchedulerMembership::NeighborsOf(int server) {
  std::vector<Node> neighbors;
  if (!job_.settings.backups) return neighbors;
  const int servers = job_.roster.expected().servers;
  const int rank = Postoffice::IDtoRank(server);
  for (const int near : std::set<int>{(rank + servers - 1) % servers, (rank + 1) % servers}) {
    const Member* const member = job_.roster.Find(IdOf(Node::SERVER, near));
    const bool is_there = member != nullptr && !member->removed;
    if (is_there && AreNeighbors(rank, near, servers)) neighbors.push_back(member->node);
  }
  return neighbors;
}

void SchedulerMembership::TakeOver(uint64_t job) {
  job_.AssertHeld();
  job_.generation = static_cast<int>(job & kGenerationMask);
  last_generation_ = job_.generation;
  job_.links->SetJob(job);
}

void SchedulerMembership::Refuse(const Node& node, const Refusal& refusal) {
  const std::string reason = Describe(node) + " was refused by " + Name() + ": " + refusal.reason;
  // A node that is refused again and again must not fill the log.
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
    MutexLock lock(&job_.mu);
    target.id = kRefusedBase + refused_++;
  }
  job_.links->Connect(target);
  Send(job_.links, Control::REFUSED, target.id, body);
  job_.links->Disconnect(target.id);
}

void SchedulerMembership::AnswerProbe(const Node& node, const Claim& claim) {
  Refusal refusal;
  std::string counts;
  {
    MutexLock lock(&job_.mu);
    refusal = WhyClosed();
    if (!refusal) refusal = AssignAll(job_.roster, policy_.get(), job_.settings, claim, node);
    const auto of = [](int there, int expected, const char* noun) {
      return expected < 0 ? Plural(there, noun)
                          : std::to_string(there) + " of " + Plural(expected, noun);
    };
    counts = of(job_.roster.Count(Node::SERVER), job_.roster.expected().servers, "server") +
             " and " +
             of(job_.roster.Count(Node::WORKER), job_.roster.expected().workers, "worker");
  }
  PS_VLOG(1) << Describe(node)
             << " asked whether it would be admitted: " << (refusal ? refusal.reason : "yes");
  if (!refusal) return SendAway(node, membership::kWould + counts + " are there");
  SendAway(node, (refusal.later ? membership::kAgain : "") + Describe(node) +
                     " would be refused by " + Name() + ": " + refusal.reason + " (" + counts +
                     " are there)");
}

}  // namespace ps
