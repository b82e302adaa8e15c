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
namespace membership {
namespace {

Refusal CheckProtocol(const Claim& claim) {
  if (claim.protocol == kProtocol) return {};
  return {"it speaks membership protocol " + std::to_string(claim.protocol) + ", the scheduler " +
          std::to_string(kProtocol) + ": install the same byteps on every node"};
}

Refusal Check(const Roster& roster, const ReplicaTable& replicas,
              const MembershipSettings& settings, const Claim& claim, const Node& node) {
  if (const Refusal refusal = CheckProtocol(claim)) return refusal;
  if (node.role == Node::SCHEDULER) return {"it says that it is a scheduler"};
  if ((claim.backups != 0) != settings.backups) {
    return {
        std::string("BYTEPS_BACKUP_STATE is ") +
        (settings.backups ? "set on the scheduler, and not there" : "not set on the scheduler") +
        ": set it alike on all nodes"};
  }
  // What is said of numbers and places may be true of the last generation only, which has not
  // ended for the scheduler yet: its nodes are given some time to connect again.
  bool later = settings.keep;
  const bool worker = node.role == Node::WORKER;
  const JobSize& expected = roster.expected();
  const int workers = expected.workers < 0 && worker ? claim.workers : expected.workers;
  const int servers = expected.servers < 0 && worker ? claim.servers : expected.servers;
  if (claim.workers >= 0 && workers >= 0 && claim.workers != workers) {
    return {"it was started for " + Plural(claim.workers, "worker") + ", the scheduler for " +
                Plural(workers, "worker") + " (WORLD_SIZE, DMLC_NUM_WORKER)",
            later};
  }
  if (claim.servers >= 0 && servers >= 0 && claim.servers != servers) {
    return {"it was started for " + Plural(claim.servers, "server") + ", the scheduler for " +
            Plural(servers, "server") + " (DMLC_NUM_SERVER)"};
  }
  if (worker && expected.replicas >= 0 && claim.replicas != expected.replicas) {
    return {"it is of a job of " + Plural(claim.replicas, "replica") + ", the others of " +
                Plural(expected.replicas, "replica") + " (worker.sh --replica, BYTEPS_REPLICA)",
            later};
  }
  if (!worker) {
    if (servers < 0 || roster.Count(Node::SERVER) < servers) return {};
    // One that is lost later may be replaced by this one.
    later = later || settings.replace_servers_s > 0;
    return {"the job has its " + Plural(servers, "server") + " already", later};
  }
  if (node.aux_id < 0 || node.aux_id >= workers) {
    return {"its rank " + std::to_string(node.aux_id) + " is not below the number of workers, " +
                std::to_string(workers) + " (RANK, DMLC_WORKER_ID)",
            later};
  }
  if (const Member* other = roster.Find(IdOf(Node::WORKER, node.aux_id))) {
    if (other->removed) {
      const auto state = replicas.state(replicas.Of(node.aux_id));
      if (state != ReplicaTable::State::kLeaving) return {};
      return {"servers do not know yet that its replica was removed", true};
    }
    // Of a replica that died the scheduler may not know yet.
    if (replicas.active()) later = true;
    return {
        "the job has a " + Describe(other->node) + " already; does another job use this scheduler?",
        later};
  }
  return {};
}

}  // namespace

Refusal Assign(const Roster& roster, const ReplicaTable& replicas,
               const MembershipSettings& settings, const Claim& claim, Node* node) {
  if (roster.IsBeingSuspended()) return {"the job before it is being suspended", true};
  const bool worker = node->role == Node::WORKER;
  if (worker && node->aux_id < 0) node->aux_id = roster.FirstFreeRank(Node::WORKER);
  Refusal refusal = Check(roster, replicas, settings, claim, *node);
  if (refusal) return refusal;
  node->id = IdOf(node->role, worker ? node->aux_id : roster.FirstFreeRank(Node::SERVER));
  return {};
}

Refusal CheckReturn(const MembershipSettings& settings, const Claim& claim, const Account& account,
                    const Node& node) {
  if (const Refusal refusal = CheckProtocol(claim)) return refusal;
  if (settings.scheduler_return_s <= 0) {
    return {
        "it is in a job that another scheduler began, and this one begins its own: set "
        "BYTEPS_SCHEDULER_RETURN_S on all nodes to go on with such a job"};
  }
  const bool same = (claim.workers < 0 || claim.workers == settings.workers) &&
                    (claim.servers < 0 || claim.servers == settings.servers);
  if (!same) {
    return {"it is in a job of " + Plural(claim.workers, "worker") + " and " +
            Plural(claim.servers, "server") + ", the scheduler was started for " +
            Plural(settings.workers, "worker") + " and " + Plural(settings.servers, "server") +
            ": start it as it was before, or at another port"};
  }
  const bool worker = node.role == Node::WORKER;
  const int rank = Postoffice::IDtoRank(node.id);
  const bool has_place = node.role != Node::SCHEDULER && node.id == IdOf(node.role, rank) &&
                         rank < (worker ? settings.workers : settings.servers) &&
                         (!worker || node.aux_id == rank);
  const int count = account.replicas.count();
  const bool fits = count == 0 || account.replicas.workers == settings.workers;
  const bool divides = !worker || (claim.replicas > 0 && settings.workers % claim.replicas == 0 &&
                                   (count == 0 || count == claim.replicas));
  if (has_place && fits && divides) return {};
  return {"what it says of its place in the job does not make sense"};
}

Refusal AssignAll(const Roster& roster, const ReplicaTable& replicas,
                  const MembershipSettings& settings, const Claim& claim, Node node) {
  const bool any_rank = node.role == Node::SERVER || node.aux_id < 0;
  const int first = node.aux_id;
  Refusal refusal = Assign(roster, replicas, settings, claim, &node);
  if (refusal || claim.probe == 1) return refusal;
  if (any_rank) {
    const bool server = node.role == Node::SERVER;
    const int expected = server ? roster.expected().servers : roster.expected().workers;
    const int room = expected < 0 ? claim.probe : expected - roster.Count(node.role);
    if (claim.probe <= room) return {};
    return {"the job has room for " + Plural(room, server ? "more server" : "more worker") +
            ", and this machine has " + std::to_string(claim.probe)};
  }
  // Those that follow the first; none is looked at beyond one that would be refused.
  for (int i = 1; i < claim.probe && !refusal; ++i) {
    node.aux_id = first + i;
    refusal = Assign(roster, replicas, settings, claim, &node);
  }
  return refusal;
}

}  // namespace membership

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
