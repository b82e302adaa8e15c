#include "byteps/net/membership/roster.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <sstream>

#include "byteps/net/link/net_address.h"
#include "byteps/net/membership/membership.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace {

// Those that stay away are named up to this many: a thousand names help nobody.
constexpr int kNamedWorkers = 16;

}  // namespace

int IdOf(Node::Role role, int rank) {
  return role == Node::WORKER ? Postoffice::WorkerRankToID(rank) : Postoffice::ServerRankToID(rank);
}

Member* Roster::Find(int id) {
  const auto it = members_.find(id);
  return it == members_.end() ? nullptr : &it->second;
}

const Member* Roster::Find(int id) const {
  const auto it = members_.find(id);
  return it == members_.end() ? nullptr : &it->second;
}

Member* Roster::Put(const Node& node) {
  Member* const member = &members_[node.id];
  member->node = node;
  return member;
}

int Roster::Count(Node::Role role) const {
  return static_cast<int>(
      std::count_if(members_.begin(), members_.end(),
                    [role](const auto& entry) { return entry.second.node.role == role; }));
}

JobSize Roster::Present() const {
  JobSize present{0, 0};
  for (const auto& [id, member] : members_) {
    if (member.left) continue;
    ++(member.node.role == Node::WORKER ? present.workers : present.servers);
  }
  return present;
}

std::vector<int> Roster::Ids(Node::Role role) const {
  std::vector<int> ids;
  for (const auto& [id, member] : members_) {
    if (member.node.role == role) ids.push_back(id);
  }
  return ids;
}

std::vector<int> Roster::PresentIds() const {
  std::vector<int> ids;
  for (const auto& [id, member] : members_) {
    if (!member.left) ids.push_back(id);
  }
  return ids;
}

int Roster::FirstFreeRank(Node::Role role) const {
  int rank = 0;
  while (members_.count(IdOf(role, rank))) ++rank;
  return rank;
}

bool Roster::IsComplete() const {
  return expected_.workers >= 0 && expected_.servers >= 0 &&
         Count(Node::WORKER) == expected_.workers && Count(Node::SERVER) == expected_.servers;
}

std::string Roster::Missing() const {
  std::string missing;
  int unnamed = 0, named = 0;
  for (int rank = 0; rank < expected_.workers; ++rank) {
    if (members_.count(IdOf(Node::WORKER, rank))) continue;
    if (named == kNamedWorkers) {
      ++unnamed;
      continue;
    }
    ++named;
    missing += (missing.empty() ? "worker " : ", worker ") + std::to_string(rank);
  }
  if (unnamed > 0) missing += ", " + Plural(unnamed, "more worker");
  const int servers = expected_.servers - Count(Node::SERVER);
  if (servers > 0) missing += (missing.empty() ? "" : ", ") + Plural(servers, "server");
  return missing;
}

bool Roster::AllWorkersLeft() const {
  return Present().workers == 0 && Count(Node::WORKER) == expected_.workers;
}

bool Roster::IsBeingSuspended() const {
  return std::any_of(members_.begin(), members_.end(),
                     [](const auto& entry) { return entry.second.left_to_suspend; });
}

void ReplicaTable::Begin(int replicas, int workers) {
  workers_ = workers;
  epoch_ = 0;
  replicas_.assign(replicas, {});
  acknowledged_.clear();
}

void ReplicaTable::Restore(const std::vector<Past>& replicas, int workers, int epoch,
                           AwakeClock::time_point now) {
  Begin(static_cast<int>(replicas.size()), workers);
  epoch_ = epoch;
  for (int i = 0; i < count(); ++i) {
    Replica* const one = &replicas_[i];
    one->state = replicas[i].state;
    one->life = replicas[i].life;
    one->donor = replicas[i].donor;
    const bool changes = one->state == State::kLeaving || one->state == State::kJoining;
    // Who spoke of an earlier life did not know of this one.
    one->epoch = changes ? epoch : one->life;
    one->since = now;
    one->ready.assign(ranks(), false);
  }
}

bool ReplicaTable::IsComing(int replica) const {
  const State state = replicas_[replica].state;
  return state == State::kGathering || state == State::kWaiting || state == State::kJoining;
}

void ReplicaTable::Lose(int replica) {
  replicas_[replica].state = State::kLeaving;
  replicas_[replica].epoch = ++epoch_;
}

void ReplicaTable::Arrive(int replica, AwakeClock::time_point now) {
  Replica* const one = &replicas_[replica];
  if (one->state != State::kAway) return;
  one->state = State::kGathering;
  one->since = now;
  one->ready.assign(ranks(), false);
}

bool ReplicaTable::Ready(int rank) {
  Replica* const one = &replicas_[Of(rank)];
  if (one->state != State::kGathering) return false;
  one->ready[rank % ranks()] = true;
  if (std::find(one->ready.begin(), one->ready.end(), false) != one->ready.end()) return false;
  one->state = State::kWaiting;
  one->life = ++epoch_;
  return true;
}

bool ReplicaTable::Admit(int replica, int life) {
  if (replica < 0 || replica >= count() || state(replica) != State::kWaiting) return false;
  if (replicas_[replica].life != life) return false;
  replicas_[replica].state = State::kJoining;
  replicas_[replica].epoch = ++epoch_;
  return true;
}

std::vector<int> ReplicaTable::Acknowledge(int server, int epoch, const std::vector<int>& servers) {
  int* const last = &acknowledged_[server];
  *last = std::max(*last, std::min(epoch, epoch_));
  int all = epoch_;
  for (const int id : servers) all = std::min(all, acknowledged_[id]);
  std::vector<int> joined;
  int donor = 0;
  while (donor < count() && state(donor) != State::kPresent) ++donor;
  if (donor == count()) donor = -1;
  for (int i = 0; i < count(); ++i) {
    Replica* const one = &replicas_[i];
    if (one->epoch > all) continue;
    if (one->state == State::kLeaving) one->state = State::kAway;
    if (one->state != State::kJoining) continue;
    one->donor = donor;
    one->state = State::kPresent;
    ++epoch_;
    joined.push_back(i);
  }
  return joined;
}

ReplicaView ReplicaTable::View(bool to_servers) const {
  ReplicaView view;
  view.workers = workers_;
  view.epoch = epoch_;
  for (const Replica& one : replicas_) {
    const bool present =
        one.state == State::kPresent || (to_servers && one.state == State::kJoining);
    view.present += present ? '1' : '0';
    const bool waiting = one.state == State::kWaiting || one.state == State::kJoining;
    view.waiting += waiting && !present ? '1' : '0';
    view.lives.push_back(one.life);
    view.donors.push_back(present && one.state == State::kPresent ? one.donor : -1);
  }
  return view;
}

namespace membership {
namespace {

Node::Role RoleOf(int id) { return id % 2 != 0 ? Node::WORKER : Node::SERVER; }

}  // namespace

std::string PackAccount(const Account& account) {
  std::ostringstream text;
  text << "\njob=" << account.job << " life=" << account.life
       << " late=" << (account.is_late ? 1 : 0) << " turns=" << PackTurns(account.turns)
       << " left=";
  for (const int rank : account.left) text << rank << ",";
  text << "\n";
  if (account.replicas.count() > 1) text << PackReplicas(account.replicas);
  return text.str();
}

bool ParseAccount(const std::string& text, Account* account) {
  *account = Account();
  const size_t begin = text.find('\n');
  if (begin == std::string::npos) return true;
  const size_t end = text.find('\n', begin + 1);
  if (end == std::string::npos) return false;
  const std::string line = text.substr(begin + 1, end - begin - 1);
  int late = 0, at = 0;
  if (sscanf(line.c_str(), "job=%20" SCNu64 " life=%9d late=%1d turns=%n", &account->job,
             &account->life, &late, &at) != 3 ||
      at == 0 || account->job == 0 || account->life < 1) {
    return false;
  }
  static const std::string kLeft = " left=";
  const size_t turns_end = line.find(kLeft, at);
  if (turns_end == std::string::npos ||
      !ParseTurns(line.substr(at, turns_end - at), &account->turns)) {
    return false;
  }
  account->is_late = late == 1;
  std::istringstream left(line.substr(turns_end + kLeft.size()));
  for (std::string one; std::getline(left, one, ',');) {
    int rank = -1;
    if (sscanf(one.c_str(), "%9d", &rank) != 1 || rank < 0) return false;
    account->left.insert(rank);
  }
  const std::string view = text.substr(end + 1);
  return view.empty() || ParseReplicas(view, &account->replicas);
}

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
  // To servers one that joins is present, so of the same epoch workers' say more.
  const bool workers_say =
      of_workers != nullptr && (of_servers == nullptr || of_workers->epoch >= of_servers->epoch);
  const ReplicaView* const newest = workers_say ? of_workers : of_servers;
  if (newest == nullptr) return replicas;
  for (int i = 0; i < count(); ++i) {
    ReplicaTable::Past& one = replicas[i];
    one.life = newest->lives[i];
    one.donor = newest->donors[i];
    const auto has = [&](const ReplicaView& view) {
      return view.IsPresent(i) && view.lives[i] == one.life;
    };
    if (newest->IsPresent(i)) {
      one.state = of_workers == nullptr || has(*of_workers) ? State::kPresent : State::kJoining;
    } else if (newest->waiting[i] == '1') {
      const bool admitted = std::any_of(accounts_.begin(), accounts_.end(), [&](const auto& entry) {
        const ReplicaView& view = entry.second.replicas;
        return RoleOf(entry.first) == Node::SERVER && view.count() == count() && has(view);
      });
      one.state = admitted ? State::kJoining : State::kWaiting;
    } else {
      // Its workers are admitted again only when all servers have dropped the last ones.
      const bool gathers = std::any_of(accounts_.begin(), accounts_.end(), [&](const auto& entry) {
        return RoleOf(entry.first) == Node::WORKER && Of(Postoffice::IDtoRank(entry.first)) == i &&
               LifeOf(entry.second, i) < 0;
      });
      one.state = gathers ? State::kGathering : State::kLeaving;
    }
  }
  return replicas;
}

int Accounts::LifeOf(const Account& account, int replica) {
  if (!account.is_late) return 0;
  const ReplicaView& view = account.replicas;
  const bool is_told =
      replica < view.count() && (view.IsPresent(replica) || view.waiting[replica] == '1');
  return is_told ? view.lives[replica] : -1;
}

bool Accounts::IsOf(int rank, const ReplicaTable::Past& replica) const {
  const Account* const account = Find(IdOf(Node::WORKER, rank));
  if (account == nullptr || replica.state == State::kLeaving) return false;
  const int life = LifeOf(*account, Of(rank));
  if (replica.state == State::kGathering) return life < 0;
  // It may not have heard yet that all of its replica are ready.
  return life == replica.life || (life < 0 && replica.life > 0);
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
