#include "byteps/recovery/scheduler/accounts.h"

#include <algorithm>

#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/roster.h"
#include "byteps/recovery/scheduler/replica_table.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace membership {
namespace {

Node::Role RoleOf(int id) { return id % 2 != 0 ? Node::WORKER : Node::SERVER; }

}  // namespace

const Account* Accounts::Find(int id) const {
  const auto it = accounts_.find(id);
  return it == accounts_.end() ? nullptr : &it->second;
}

std::set<int> Accounts::Left() const {
  std::set<int> left;
  for (const auto& [id, account] : accounts_) {
    if (RoleOf(id) == Node::SERVER) left.insert(account.left.begin(), account.left.end());
  }
  return left;
}

Turns Accounts::NewestTurns() const {
  Turns newest;
  for (const auto& [id, account] : accounts_) {
    for (const auto& [rank, turn] : account.turns) newest[rank] = std::max(newest[rank], turn);
  }
  return newest;
}

bool Accounts::HasPlace(int server_rank) const {
  const Account* const account = Find(IdOf(Node::SERVER, server_rank));
  return account != nullptr &&
         TurnOf(account->turns, server_rank) == TurnOf(NewestTurns(), server_rank);
}

const ReplicaView* Accounts::Newest(Node::Role role) const {
  const ReplicaView* newest = nullptr;
  for (const auto& [id, account] : accounts_) {
    if (RoleOf(id) != role || account.replicas.count() != count()) continue;
    if (newest == nullptr || account.replicas.epoch > newest->epoch) newest = &account.replicas;
  }
  return newest;
}

int Accounts::NewestEpoch() const {
  int epoch = 0;
  for (const auto& [id, account] : accounts_) epoch = std::max(epoch, account.replicas.epoch);
  return epoch;
}

std::vector<ReplicaTable::Past> Accounts::Replicas() const {
  std::vector<ReplicaTable::Past> replicas(count());
  const ReplicaView* const of_servers = Newest(Node::SERVER);
  const ReplicaView* const of_workers = Newest(Node::WORKER);
  // Servers see a joining replica as present before it has joined. So the workers' views of the
  // epoch say more.
  const bool workers_say =
      of_workers != nullptr && (of_servers == nullptr || of_workers->epoch >= of_servers->epoch);
  const ReplicaView* const newest = workers_say ? of_workers : of_servers;
  if (newest == nullptr) return replicas;
  for (int i = 0; i < count(); ++i) {
    ReplicaTable::Past& past = replicas[i];
    past.ready_epoch = newest->ready_epochs[i];
    past.donor = newest->donors[i];
    const auto has = [&](const ReplicaView& view) {
      return view.IsPresent(i) && view.ready_epochs[i] == past.ready_epoch;
    };
    if (newest->IsPresent(i)) {
      past.state = of_workers == nullptr || has(*of_workers) ? State::kPresent : State::kJoining;
    } else if (newest->waiting[i] == '1') {
      const bool admitted = std::any_of(accounts_.begin(), accounts_.end(), [&](const auto& entry) {
        const ReplicaView& view = entry.second.replicas;
        return RoleOf(entry.first) == Node::SERVER && view.count() == count() && has(view);
      });
      past.state = admitted ? State::kJoining : State::kWaiting;
    } else {
      // A removed replica's workers are admitted again only after all servers have dropped the old
      // workers.
      const bool gathers = std::any_of(accounts_.begin(), accounts_.end(), [&](const auto& entry) {
        return RoleOf(entry.first) == Node::WORKER && Of(Postoffice::IDtoRank(entry.first)) == i &&
               ReadyEpochOf(entry.second, i) < 0;
      });
      past.state = gathers ? State::kGathering : State::kLeaving;
    }
  }
  return replicas;
}

int Accounts::ReadyEpochOf(const Account& account, int replica) {
  if (!account.is_late) return 0;
  const ReplicaView& view = account.replicas;
  const bool is_told =
      replica < view.count() && (view.IsPresent(replica) || view.waiting[replica] == '1');
  return is_told ? view.ready_epochs[replica] : -1;
}

bool Accounts::IsOf(int rank, const ReplicaTable::Past& replica) const {
  const Account* const account = Find(IdOf(Node::WORKER, rank));
  if (account == nullptr || replica.state == State::kLeaving) return false;
  const int ready_epoch = ReadyEpochOf(*account, Of(rank));
  if (replica.state == State::kGathering) return ready_epoch < 0;
  // A worker may not know yet that all workers of its replica have become ready.
  return ready_epoch == replica.ready_epoch || (ready_epoch < 0 && replica.ready_epoch > 0);
}

std::vector<int> Accounts::Missing() const {
  std::vector<int> missing;
  const Turns turns = NewestTurns();
  for (int rank = 0; rank < size_.servers; ++rank) {
    if (!IsVacant(turns, rank) && !HasPlace(rank)) missing.push_back(IdOf(Node::SERVER, rank));
  }
  const std::set<int> left = Left();
  const auto replicas = Replicas();
  for (int rank = 0; rank < size_.workers; ++rank) {
    const State state = replicas[Of(rank)].state;
    const bool is_there = state != State::kLeaving && state != State::kGathering;
    if (!is_there || left.count(rank) > 0 || IsOf(rank, replicas[Of(rank)])) continue;
    missing.push_back(IdOf(Node::WORKER, rank));
  }
  return missing;
}

}  // namespace membership
}  // namespace ps
