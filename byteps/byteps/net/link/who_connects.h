// Who connects to whom: everybody to the scheduler, and a worker to each server.  Who was
// connected to answers along the same connections.
#ifndef BYTEPS_NET_LINK_WHO_CONNECTS_H_
#define BYTEPS_NET_LINK_WHO_CONNECTS_H_

#include "ps/internal/message.h"

namespace ps {

inline bool ConnectsTo(Node::Role from, Node::Role to) {
  if (from == to) return false;
  return to == Node::SCHEDULER || (from == Node::WORKER && to == Node::SERVER);
}

// Whether anybody connects to a node of this role, which listens then.
inline bool Listens(Node::Role role) { return role != Node::WORKER; }

// Whether a node may call itself a worker of the job by this id.
inline bool IsWorkerId(int node_id) {
  return node_id != Node::kEmpty && node_id > 8 && node_id % 2 == 1;
}

}  // namespace ps
#endif  // BYTEPS_NET_LINK_WHO_CONNECTS_H_
