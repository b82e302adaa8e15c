#include "byteps/recovery/scheduler/scheduler_return.h"

#include <algorithm>
#include <climits>
#include <string>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/membership/scheduler_membership.h"
#include "ps/internal/postoffice.h"

namespace ps {

using membership::Account;
using membership::Claim;
using membership::Refusal;
using membership::Send;

namespace {

// Returns a node of which this scheduler knows only the rank.
Node Unknown(int id) {
  Node node;
  node.id = id;
  node.role = id % 2 != 0 ? Node::WORKER : Node::SERVER;
  node.aux_id = node.role == Node::WORKER ? Postoffice::IDtoRank(id) : -1;
  node.hostname = "unknown";
  node.port = 0;
  return node;
}

// Returns the reason to refuse a node that returns and claims its id.
Refusal CheckReturn(const MembershipSettings& settings, const Claim& claim, const Account& account,
                    const Node& node) {
  if (const Refusal refusal = CheckProtocol(claim)) return refusal;
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

}  // namespace

bool SchedulerReturn::gathers() const {
  job_->AssertHeld();
  return gathers_;
}

bool SchedulerReturn::Forget(int node_id) {
  job_->AssertHeld();
  if (!gathers_) return false;
  accounts_.Forget(node_id);
  job_->roster.Erase(node_id);
  return true;
}

void SchedulerReturn::OnBeat(Clock::time_point now) {
  {
    MutexLock lock(&job_->mu);
    if (!gathers_ || now - since_ <= ToDuration(job_->settings.scheduler_return_s)) return;
  }
  GoOn(true);
}

void SchedulerReturn::OnReturn(const Node& node, const Claim& claim, const Account& account) {
  PS_PROBE(kNodeReturns);
  std::vector<Node> aside;  // nodes that must give up their ids to the returned node
  std::string replicas;
  std::vector<ServerPlaces::Word> words;
  Refusal refusal = CheckReturn(job_->settings, claim, account, node);
  {
    MutexLock lock(&job_->mu);
    if (job_->state == ScheduledJob::State::kStopped) return;
    if (!refusal) refusal = WhyRefused(node, claim, account);
    if (!refusal) aside = MakeRoom(node, account);
  }
  for (const Node& other : aside) {
    scheduler_->SendAway(other, membership::kAgain + Describe(other) +
                                    " came before the nodes of the job that " + scheduler_->Name() +
                                    " goes on with");
  }
  if (refusal) return scheduler_->Refuse(node, refusal);
  job_->links->Connect(node);
  int generation = 0, scheduler_number = 0;
  {
    MutexLock lock(&job_->mu);
    if (job_->state != ScheduledJob::State::kActive) return;
    Member* const member = job_->roster.Put(node);
    member->left = false;  // the node will send its LEAVE again
    member->heard = Clock::now();
    member->link_mbps = claim.link_mbps;
    generation = job_->generation;
    if (gathers_) {
      job_->scheduler_number = std::max(job_->scheduler_number, account.scheduler_number + 1);
      const int claimed = account.replicas.count();  // servers claim no replicas
      size_.replicas = std::max({size_.replicas, claim.replicas, claimed});
      accounts_.Expect(size_);
      accounts_.Put(node.id, account);
    } else {
      const bool server = node.role == Node::SERVER;
      if (table_->active())
        replicas = membership::Pack(membership::MemberWord(table_->View(server)));
      words = places_->Words();
    }
    scheduler_number = job_->scheduler_number;
  }
  Send(job_->links, Control::WELCOME, node.id,
       membership::Pack(membership::Welcome{generation, scheduler_number}), {node});
  if (!replicas.empty()) Send(job_->links, Control::MEMBERS, node.id, replicas);
  for (const auto& [server, word, nodes] : words) {
    if (server != node.id)
      Send(job_->links, Control::MEMBERS, node.id, membership::Pack(word), nodes);
  }
  scheduler_->EmitProgress(MembershipEvent::kAdmitted, node);
  GoOn(false);
}

Refusal SchedulerReturn::WhyRefused(const Node& node, const Claim& claim,
                                    const Account& account) const {
  if (job_->state != ScheduledJob::State::kActive) return scheduler_->WhyClosed();
  const bool has_begun = job_->has_begun;
  if ((has_begun || gathers_) && account.job != job_->links->job()) {
    return {"it is in another job than the one that this scheduler goes on with"};
  }
  const Member* const member = job_->roster.Find(node.id);
  if (gathers_) {
    const int replicas = size_.replicas;
    if (node.role == Node::WORKER && replicas > 0 && claim.replicas != replicas) {
      return {"it is of a job of " + Plural(claim.replicas, "replica") + ", the others of " +
              Plural(replicas, "replica") + " (worker.sh --replica, BYTEPS_REPLICA)"};
    }
    const Account* const other = accounts_.Find(node.id);
    if (other == nullptr) return {};
    const int rank = Postoffice::IDtoRank(node.id);
    const bool newer = node.role == Node::SERVER ? membership::TurnOf(account.turns, rank) >=
                                                       membership::TurnOf(other->turns, rank)
                                                 : account.replicas.epoch >= other->replicas.epoch;
    if (newer) return {};
    return {"another process has its place in the job"};
  }
  if (!has_begun) return {};
  if (account.scheduler_number > job_->scheduler_number) {
    return {"another scheduler, which began later, has the job"};
  }
  if (member == nullptr) return {"the job goes on without it"};
  if (member->removed) return {"its replica was removed, and the others go on"};
  if (member->left || TokenOf(member->node) == TokenOf(node)) return {};
  return {"another process has its place in the job"};
}

std::vector<Node> SchedulerReturn::MakeRoom(const Node& node, const Account& account) {
  std::vector<Node> aside;
  if (job_->has_begun) return aside;
  if (gathers_) {
    // The node of this id is an earlier process, which the previous scheduler had removed.
    const Member* const member = job_->roster.Find(node.id);
    if (member != nullptr && TokenOf(member->node) != TokenOf(node)) aside.push_back(member->node);
    return aside;
  }
  BPS_LOG(WARNING) << Describe(node) << " is in a job that another scheduler began: "
                   << "waiting for its other nodes, to go on with it";
  for (const auto& [id, member] : job_->roster.members()) aside.push_back(member.node);
  if (!aside.empty()) PS_PROBE(kNewcomersGiveWay);
  job_->roster.Clear();
  job_->any_worker = false;
  gathers_ = true;
  since_ = Clock::now();
  size_ = {job_->settings.workers, job_->settings.servers, 0};
  scheduler_->TakeOver(account.job);
  return aside;
}

bool SchedulerReturn::HoldsBack(const Message& msg) {
  job_->AssertHeld();
  if (!gathers_ || msg.meta.control.cmd == Control::HEARTBEAT) return false;
  held_.push_back(msg);
  return true;
}

void SchedulerReturn::GoOn(bool late) {
  std::vector<Node> strays, leavers;
  std::vector<int> missing;
  std::vector<Message> held;
  bool over = false;
  {
    MutexLock lock(&job_->mu);
    if (!gathers_ || job_->state != ScheduledJob::State::kActive) return;
    missing = accounts_.Missing();
    if (!missing.empty() && !late) return;
    PS_PROBE(kSchedulerGoesOn);
    gathers_ = false;
    held.swap(held_);
    strays = Rebuild(missing);
    accounts_ = {};
    over = leavers_->IsOver();
    if (!over) leavers = TakeLeavers(held, missing);
    over = over || !leavers.empty();
  }
  BPS_LOG(WARNING) << scheduler_->Name() << " goes on with the job of another one that died";
  for (const Node& node : strays) {
    const bool server = node.role == Node::SERVER;
    Send(job_->links, Control::JOB_FAILED, node.id,
         Describe(node) + " cannot go on: " +
             (server ? "it was lost to the job, and another server may have its place"
                     : "its replica was removed"));
    job_->links->Disconnect(node.id);
  }
  places_->TellAll();
  replicas_->Tell("");
  for (const Node& node : leavers) Send(job_->links, Control::NODE_LEFT, node.id, "", {node});
  if (over) return scheduler_->EndJob();  // missing nodes may already know that the job is over
  scheduler_->EmitProgress(MembershipEvent::kComplete, job_->links->self());
  for (const int id : missing) {
    scheduler_->OnGone(id,
                       "did not come back to " + scheduler_->Name() + " within " +
                           Limit(job_->settings.scheduler_return_s, "BYTEPS_SCHEDULER_RETURN_S"));
  }
  // Workers' messages come first. So a server that most workers have lost cannot first report them
  // as lost.
  std::stable_partition(held.begin(), held.end(),
                        [](const Message& msg) { return IsWorkerId(msg.meta.sender); });
  for (const Message& msg : held) scheduler_->Handle(msg);
  scheduler_->Wake();
}

std::vector<Node> SchedulerReturn::TakeLeavers(const std::vector<Message>& held,
                                               const std::vector<int>& missing) {
  const std::set<int> away(missing.begin(), missing.end());
  const std::vector<int> servers = job_->roster.Ids(Node::SERVER);
  // Servers that know that the job is over do not return, so they cannot say which workers have
  // left.
  const bool no_server =
      std::all_of(servers.begin(), servers.end(), [&](int id) { return away.count(id) > 0; });
  std::set<int> saying;
  for (const Message& msg : held) {
    if (msg.meta.control.cmd != Control::LEAVE) continue;
    const auto leave = membership::Parse<membership::Leave>(msg.meta.body);
    if (!leave) continue;
    const auto departure = membership::DepartureOf(*leave, job_->settings.keep);
    if (departure.failure.empty() && !departure.suspend) saying.insert(msg.meta.sender);
  }
  std::vector<Node> leavers;
  for (const auto& [id, member] : job_->roster.members()) {
    if (member.node.role != Node::WORKER || member.left) continue;
    if (no_server && away.count(id) > 0) continue;
    if (saying.count(id) == 0) return {};
    leavers.push_back(member.node);
  }
  for (const Node& node : leavers) job_->roster.Find(node.id)->left = true;
  return leavers;
}

std::vector<Node> SchedulerReturn::Rebuild(const std::vector<int>& missing) {
  using ReplicaState = ReplicaTable::State;
  const auto now = Clock::now();
  const membership::Accounts& accounts = accounts_;
  JobSize size = size_;
  size.replicas = std::max(size.replicas, 1);
  job_->roster.Expect(size);
  job_->any_worker = job_->has_begun = true;
  job_->last_arrival = now;
  const auto past = accounts.Replicas();
  table_->Restore(past, size.workers, accounts.NewestEpoch() + 1, now);
  for (const ReplicaTable::Past& replica : past) {
    if (replica.state == ReplicaState::kLeaving) PS_PROBE(kTakesOverLeaving);
    if (replica.state == ReplicaState::kGathering) PS_PROBE(kTakesOverGathering);
    if (replica.state == ReplicaState::kWaiting) PS_PROBE(kTakesOverWaiting);
    if (replica.state == ReplicaState::kJoining) PS_PROBE(kTakesOverJoining);
  }
  std::vector<Node> strays;
  const auto put = [&](int id) PS_REQUIRES(job_->mu) {
    Member* const member = job_->roster.Put(Unknown(id));
    member->heard = now;
    member->link_mbps = INT_MAX;  // the node does not count for the slowest link
    return member;
  };
  const std::set<int> left = accounts.Left();
  if (!left.empty()) PS_PROBE(kTakesOverLeft);
  for (int rank = 0; rank < size.workers; ++rank) {
    const int id = IdOf(Node::WORKER, rank);
    const ReplicaTable::Past& replica = past[table_->Of(rank)];
    if (accounts.IsOf(rank, replica)) continue;
    const Member* const other = job_->roster.Find(id);
    if (other != nullptr) strays.push_back(other->node);
    Member* const member = put(id);
    if (other != nullptr) member->node = strays.back();
    if (replica.state == ReplicaState::kLeaving || replica.state == ReplicaState::kGathering) {
      member->left = member->removed = true;
      // New workers of the replica register only after all servers have dropped its old workers.
      if (replica.state == ReplicaState::kLeaving) replicas_->AddRemoved(member->node);
    } else if (left.count(rank) > 0) {
      member->left = true;
      scheduler_->Depart(member->node);
    }
  }
  for (int rank = 0; rank < size.servers; ++rank) {
    const Member* const member = job_->roster.Find(IdOf(Node::SERVER, rank));
    if (member == nullptr || accounts.HasPlace(rank)) continue;
    strays.push_back(member->node);
    job_->roster.Erase(member->node.id);
  }
  places_->Restore(accounts.NewestTurns());
  for (const int id : missing) {
    if (job_->roster.Find(id) == nullptr) put(id);
  }
  if (!missing.empty()) PS_PROBE(kNodeStaysAway);
  return strays;
}

}  // namespace ps
