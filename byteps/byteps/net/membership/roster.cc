#include "byteps/net/membership/roster.h"

#include <algorithm>

#include "byteps/base/config.h"
#include "byteps/net/link/net_address.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace {

// Limit of names in a list of missing workers.
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

}  // namespace ps
