// What the scheduler tells its own process of the job's progress.
#include <algorithm>

#include "byteps/base/mutex.h"
#include "byteps/net/link/node_text.h"
#include "byteps/net/membership/membership.h"
#include "ps/internal/postoffice.h"

namespace ps {

void Membership::EmitProgress(MembershipEvent::Kind kind, const Node& node) {
  MembershipEvent event;
  event.kind = kind;
  event.node = node;
  event.node_id = node.id;
  event.rank = Postoffice::IDtoRank(node.id);
  event.reason = Describe(node) + " left the job";
  {
    MutexLock lock(&mu_);
    event.incarnation = incarnation_;
    event.expected_workers = expected_workers_;
    event.expected_servers = expected_servers_;
    for (const auto& entry : peers_) {
      if (entry.second.left) continue;
      ++(entry.second.node.role == Node::WORKER ? event.workers : event.servers);
    }
  }
  Emit(event);
}

}  // namespace ps
