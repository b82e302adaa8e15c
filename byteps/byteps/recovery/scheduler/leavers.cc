#include "byteps/recovery/scheduler/leavers.h"

#include <algorithm>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/scheduler_membership.h"
#include "ps/internal/postoffice.h"

namespace ps {

using membership::Send;

namespace {

// Seconds that a worker lingers after its work is done: long enough to notice that a server was
// lost.
constexpr double kLingerSeconds = 5;

}  // namespace

std::vector<Node> Leavers::OnLeft(Member* worker) {
  job_->AssertHeld();
  worker->lingers = job_->settings.replace_servers_s > 0;
  const bool all_left = HaveAllLeft();  // nobody needs lingering workers any more
  std::vector<Node> may_go;
  for (const auto& [id, other] : job_->roster.members()) {
    const bool goes =
        id == worker->node.id ? all_left || !other.lingers : all_left && other.lingers;
    if (goes) may_go.push_back(other.node);
  }
  for (const Node& node : may_go) {
    job_->roster.Find(node.id)->lingers = false;
    Tell(node);
  }
  if (asks()) return {};  // they leave once all servers know
  return may_go;
}

void Leavers::Tell(const Node& worker) {
  if (asks()) asked_[worker.id] = {worker, {}};
  scheduler_->Depart(worker);
}

bool Leavers::HaveAllLeft() const {
  job_->AssertHeld();
  if (!replicas_->active()) return job_->roster.AllWorkersLeft();
  return std::none_of(
      job_->roster.members().begin(), job_->roster.members().end(),
      [&](const auto& entry) PS_REQUIRES(job_->mu) {
        const Member& member = entry.second;
        return member.node.role == Node::WORKER && !member.left &&
               !replicas_->IsComing(replicas_->Of(Postoffice::IDtoRank(entry.first)));
      });
}

bool Leavers::IsOver() const {
  job_->AssertHeld();
  return asked_.empty() && HaveAllLeft();
}

bool Leavers::Release(Member* worker) {
  job_->AssertHeld();
  const bool waits = asked_.erase(worker->node.id) > 0;
  return std::exchange(worker->lingers, false) || waits;
}

void Leavers::Forget(int server) {
  job_->AssertHeld();
  for (auto& [id, leaver] : asked_) leaver.known.erase(server);
}

void Leavers::Clear() {
  job_->AssertHeld();
  asked_.clear();
}

bool Leavers::Lose(int node_id) {
  {
    MutexLock lock(&job_->mu);
    Member* const member = job_->roster.Find(node_id);
    if (member == nullptr || !std::exchange(member->lingers, false)) return false;
    scheduler_->Depart(member->node);
  }
  scheduler_->Wake();
  return true;
}

void Leavers::LetGo(Clock::time_point now) {
  std::vector<Node> gone;
  bool over = false;
  {
    MutexLock lock(&job_->mu);
    if (job_->state != ScheduledJob::State::kActive) return;
    if (!places_->any_vacant()) {  // if a server was lost, their sums may be needed
      for (const auto& [id, member] : job_->roster.members()) {
        const auto since = std::max(member.left_at, places_->last_filled());
        if (!member.lingers || member.removed || now - since < ToDuration(kLingerSeconds)) continue;
        gone.push_back(member.node);
      }
      for (const Node& node : gone) {
        job_->roster.Find(node.id)->lingers = false;
        Tell(node);
      }
      if (asks()) gone.clear();
    }
    // If a rank is vacant, its next server must be asked, too, unless all workers have left.
    if (!places_->any_vacant() || HaveAllLeft()) {
      const std::vector<int> servers = job_->roster.Ids(Node::SERVER);
      const size_t before = asked_.size();
      std::erase_if(asked_, [&](const auto& entry) {
        const auto& [node, known] = entry.second;
        const auto knows = [&](int id) { return known.count(id) > 0; };
        if (!std::all_of(servers.begin(), servers.end(), knows)) return false;
        gone.push_back(node);
        return true;
      });
      over = asked_.size() < before && IsOver();
    }
  }
  for (const Node& node : gone) Send(job_->links, Control::NODE_LEFT, node.id, "", {node});
  if (!over) return;
  PS_PROBE(kLastLeaves);
  scheduler_->EndJob();
}

void Leavers::OnKnown(int server, int worker_rank) {
  {
    MutexLock lock(&job_->mu);
    const auto leaver = asked_.find(IdOf(Node::WORKER, worker_rank));
    if (leaver == asked_.end()) return;
    leaver->second.known.insert(server);
  }
  LetGo(Clock::now());
}

void Leavers::LetAllGo() {
  std::vector<Node> all;
  {
    MutexLock lock(&job_->mu);
    for (const auto& [id, leaver] : asked_) all.push_back(leaver.node);
  }
  for (const Node& node : all) Send(job_->links, Control::NODE_LEFT, node.id, "", {node});
}

}  // namespace ps
