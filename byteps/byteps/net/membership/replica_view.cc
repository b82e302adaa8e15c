#include "byteps/net/membership/replica_view.h"

namespace ps {

std::set<int> ReplicaView::AbsentRanks() const {
  std::set<int> ranks;
  for (int replica = 0; replica < count(); ++replica) {
    if (IsPresent(replica)) continue;
    for (int i = 0; i < workers / count(); ++i) ranks.insert(FirstRank(replica) + i);
  }
  return ranks;
}

}  // namespace ps
