#include "byteps/recovery/scheduler/replicas.h"

#include <algorithm>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/membership/scheduler_membership.h"
#include "ps/internal/postoffice.h"

namespace ps {

using membership::MemberWord;
using membership::Send;

int Replicas::ReplicaOf(int worker) const { return table_->Of(Postoffice::IDtoRank(worker)); }

membership::Refusal Replicas::WhyTaken(membership::Refusal refusal, const Member& member) const {
  job_->AssertHeld();
  if (!table_->active()) return refusal;
  if (!member.removed) {
    refusal.later = true;  // the scheduler may not know yet that the previous replica has died
    return refusal;
  }
  if (table_->state(ReplicaOf(member.node.id)) != ReplicaTable::State::kLeaving) return {};
  return {"servers do not know yet that its replica was removed", true};
}

void Replicas::OnArrival(const Member& worker) {
  job_->AssertHeld();
  table_->Arrive(ReplicaOf(worker.node.id), worker.heard);
}

bool Replicas::IsComing(int worker) const {
  job_->AssertHeld();
  return table_->active() && table_->IsComing(ReplicaOf(worker));
}

void Replicas::AddRemoved(const Node& worker) {
  job_->AssertHeld();
  removed_.push_back(worker);
}

void Replicas::Clear() {
  job_->AssertHeld();
  *table_ = ReplicaTable();
  removed_.clear();
}

bool Replicas::Lose(int node_id, const std::string& reason) {
  std::string news;
  std::vector<int> to_tell;
  std::vector<Node> done;  // workers that are done with their work, and linger
  bool over = false;
  {
    MutexLock lock(&job_->mu);
    const Member* const member = job_->roster.Find(node_id);
    if (job_->state != ScheduledJob::State::kActive || !table_->active() || member == nullptr ||
        member->node.role != Node::WORKER) {
      return false;
    }
    if (member->removed) return true;
    const int replica = ReplicaOf(node_id);
    if (!OthersGoOn(replica)) return false;
    PS_PROBE(kReplicaRemoved);
    if (table_->IsComing(replica)) PS_PROBE(kJoinerRemoved);
    table_->Lose(replica);
    const int first = table_->View(false).FirstRank(replica);
    for (int i = 0; i < table_->ranks(); ++i) {
      Member* const worker = job_->roster.Find(IdOf(Node::WORKER, first + i));
      if (worker == nullptr || worker->removed) continue;
      if (!worker->left) to_tell.push_back(worker->node.id);
      if (leavers_->Release(worker)) done.push_back(worker->node);
      worker->left = worker->removed = true;
      removed_.push_back(worker->node);
    }
    over = leavers_->IsOver();
    news = "replica " + std::to_string(replica) + " was removed: " + reason;
  }
  BPS_LOG(WARNING) << news << "; the others go on";
  Tell(news);
  for (const int id : to_tell) {
    Send(job_->links, Control::JOB_FAILED, id, news);
    job_->links->Disconnect(id);
  }
  for (const Node& node : done) {
    Send(job_->links, Control::NODE_LEFT, node.id, "", {node});
    job_->links->Disconnect(node.id);
  }
  if (over) scheduler_->EndJob();  // another replica has done all the work
  return true;
}

bool Replicas::OthersGoOn(int replica) const {
  return std::any_of(job_->roster.members().begin(), job_->roster.members().end(),
                     [&](const auto& entry) PS_REQUIRES(job_->mu) {
                       const Member& member = entry.second;
                       if (member.node.role != Node::WORKER || member.removed) return false;
                       const int other = ReplicaOf(entry.first);
                       return other != replica &&
                              table_->state(other) == ReplicaTable::State::kPresent;
                     });
}

bool Replicas::IsOfPresent(int rank) const {
  const Member* const member = job_->roster.Find(IdOf(Node::WORKER, rank));
  return member != nullptr && !member->left &&
         table_->state(table_->Of(rank)) == ReplicaTable::State::kPresent;
}

std::vector<Node> Replicas::CompleteReplica(int replica) const {
  std::vector<Node> workers;
  for (const auto& [id, member] : job_->roster.members()) {
    if (member.node.role != Node::WORKER || ReplicaOf(id) != replica) continue;
    if (member.removed) return {};
    workers.push_back(member.node);
  }
  return workers;
}

void Replicas::OnNewcomer(const Node& worker) {
  {
    MutexLock lock(&job_->mu);
    if (!table_->active() || CompleteReplica(ReplicaOf(worker.id)).empty()) return;
  }
  if (scheduler_->FailIfUnreachable()) return;
  {
    MutexLock telling(&job_->telling_mu);
    std::vector<Node> workers;
    membership::Beginning beginning;
    beginning.late = true;
    std::vector<MemberWord> lost;
    {
      MutexLock lock(&job_->mu);
      if (!table_->active()) return;
      workers = CompleteReplica(ReplicaOf(worker.id));
      beginning.turns = places_->TurnsToTell();
      lost = places_->LostWords();
    }
    scheduler_->TellBeginning(workers, beginning);
    for (const Node& node : workers) {
      for (const MemberWord& word : lost)
        Send(job_->links, Control::MEMBERS, node.id, membership::Pack(word));
    }
  }
  Tell("");
}

void Replicas::OnBegun() {
  // When all workers have left or are lost, only servers can tell a restarted scheduler that the
  // job has replicas. So the scheduler tells each server now.
  if (job_->settings.scheduler_return_s <= 0) return;
  std::vector<int> servers;
  std::string view;
  MutexLock telling(&job_->telling_mu);
  {
    MutexLock lock(&job_->mu);
    if (!table_->active()) return;
    servers = job_->roster.Ids(Node::SERVER);
    view = membership::Pack(MemberWord(table_->View(true)));
  }
  for (const int id : servers) Send(job_->links, Control::MEMBERS, id, view);
}

void Replicas::Tell(const std::string& news) {
  ReplicaView to_servers, to_workers;
  std::vector<int> servers, workers;
  std::vector<Node> removed;
  MutexLock telling(&job_->telling_mu);
  {
    MutexLock lock(&job_->mu);
    if (job_->state != ScheduledJob::State::kActive || !table_->active()) return;
    removed.swap(removed_);
    to_servers = table_->View(true);
    to_workers = table_->View(false);
    to_servers.news = to_workers.news = news;
    servers = job_->roster.Ids(Node::SERVER);
    for (const auto& [id, member] : job_->roster.members()) {
      if (member.node.role == Node::WORKER && !member.left) workers.push_back(id);
    }
  }
  const std::string for_servers = membership::Pack(MemberWord(to_servers));
  const std::string for_workers = membership::Pack(MemberWord(to_workers));
  for (const int id : servers) Send(job_->links, Control::MEMBERS, id, for_servers, removed);
  for (const int id : workers) Send(job_->links, Control::MEMBERS, id, for_workers);
  MembershipEvent event;
  event.kind = MembershipEvent::kReplicas;
  event.replicas = to_workers;
  job_->announcer.Tell(event);
}

void Replicas::OnWord(int sender, const MemberWord& word) {
  std::string news;
  bool changed = false;
  int passed_on = Node::kEmpty;
  int removed = Node::kEmpty;
  std::string why;
  {
    MutexLock lock(&job_->mu);
    const Member* const member = job_->roster.Find(sender);
    if (job_->state != ScheduledJob::State::kActive || !table_->active() || member == nullptr)
      return;
    if (member->node.role == Node::SERVER) {
      if (const auto* acknowledged = std::get_if<membership::Acknowledged>(&word)) {
        for (const int replica :
             table_->Acknowledge(sender, acknowledged->epoch, job_->roster.Ids(Node::SERVER))) {
          PS_PROBE(kReplicaJoined);
          news += (news.empty() ? "replica " : ", replica ") + std::to_string(replica);
        }
        changed = !news.empty();
        if (changed) news += " has joined";
      } else if (const auto* awaited = std::get_if<membership::Awaited>(&word)) {
        if (IsOfPresent(awaited->rank)) passed_on = IdOf(Node::WORKER, awaited->rank);
      } else if (const auto* late = std::get_if<membership::Late>(&word)) {
        // The report may be about a replica that was removed since then, and has come back.
        if (!IsOfPresent(late->rank) || !table_->Knows(late->rank, late->epoch)) return;
        removed = IdOf(Node::WORKER, late->rank);
        why = late->why;
      }
    } else if (std::holds_alternative<membership::Ready>(word)) {
      changed = table_->Ready(Postoffice::IDtoRank(sender));
      if (changed) PS_PROBE(kReplicaWaits);
    } else if (const auto* admit = std::get_if<membership::Admit>(&word)) {
      // Only workers of joined replicas admit replicas.
      if (table_->IsComing(ReplicaOf(sender))) return;
      changed = table_->Admit(admit->replica, admit->ready_epoch);
      if (changed) PS_PROBE(kReplicaAdmitted);
    }
  }
  if (passed_on != Node::kEmpty)
    Send(job_->links, Control::MEMBERS, passed_on, membership::Pack(word));
  if (removed != Node::kEmpty) {
    PS_PROBE(kLateRemoved);
    Lose(removed, why);
  }
  if (!changed) return;
  if (!news.empty()) BPS_LOG(INFO) << news;
  Tell(news);
}

void Replicas::CheckComing(Clock::time_point now) {
  std::vector<int> late;
  {
    MutexLock lock(&job_->mu);
    if (!table_->active()) return;
    for (const auto& [id, member] : job_->roster.members()) {
      if (member.node.role != Node::WORKER || member.removed) continue;
      const int replica = ReplicaOf(id);
      if (table_->state(replica) != ReplicaTable::State::kGathering) continue;
      if (now - table_->GathersSince(replica) <= ToDuration(job_->settings.start_timeout_s))
        continue;
      if (CompleteReplica(replica).empty()) late.push_back(id);
    }
  }
  for (const int id : late) {
    scheduler_->OnGone(id, "waited for the other workers of its replica for " +
                               Limit(job_->settings.start_timeout_s, "BYTEPS_START_TIMEOUT_S"));
  }
}

}  // namespace ps
