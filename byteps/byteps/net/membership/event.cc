#include "byteps/net/membership/event.h"

#include <algorithm>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/net/link/node_text.h"
#include "ps/internal/message.h"

namespace ps {

NodeInfo InfoOf(const Node& node) {
  using byteps::core::Role;
  const Role role = node.role == Node::SCHEDULER ? Role::kScheduler
                    : node.role == Node::WORKER  ? Role::kWorker
                                                 : Role::kServer;
  const int nics = std::max(static_cast<int>(node.nics.size()), 1);
  return {role, node.id, AddressOf(node), nics};
}

std::string PlaceOf(const NodeInfo& node) {
  return node.address + (node.nics > 1 ? " on " + Plural(node.nics, "NIC") : "");
}

int ReplicaView::Donor(int joiner) const {
  for (int replica = 0; replica < count(); ++replica) {
    if (replica != joiner && IsPresent(replica)) return replica;
  }
  return -1;
}

std::set<int> ReplicaView::AbsentRanks() const {
  std::set<int> ranks;
  for (int replica = 0; replica < count(); ++replica) {
    if (IsPresent(replica)) continue;
    for (int i = 0; i < workers / count(); ++i) ranks.insert(FirstRank(replica) + i);
  }
  return ranks;
}

Announcer::Announcer(Listener listener) : listener_(std::move(listener)) {}

void Announcer::Tell(const MembershipEvent& event) {
  const bool is_end = (event.kind == MembershipEvent::kFailed && event.next_incarnation == 0) ||
                      (event.kind == MembershipEvent::kEnded && !event.suspended);
  BPS_INVARIANT_NOTED("a job ends once", !is_end || !over_.exchange(true), event.reason);
  if (listener_) listener_(event);
}

void Announcer::TellFailure(const std::string& reason, int next_incarnation, const char* file,
                            int line) {
  MembershipEvent event;
  event.kind = MembershipEvent::kFailed;
  event.next_incarnation = next_incarnation;
  event.reason = reason;
  event.file = file;
  event.line = line;
  Tell(event);
}

}  // namespace ps
