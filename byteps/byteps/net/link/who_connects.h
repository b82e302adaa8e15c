// Who connects to whom: everybody to the scheduler, and a worker to each server.  With
// BYTEPS_BACKUP_STATE the servers are a ring by rank, in which each keeps a copy of its state at
// the next one, and neighbors have a link.  Who was connected to answers along the same
// connections.
#ifndef BYTEPS_NET_LINK_WHO_CONNECTS_H_
#define BYTEPS_NET_LINK_WHO_CONNECTS_H_

#include "ps/internal/message.h"

namespace ps {

inline bool ConnectsTo(Node::Role from, Node::Role to) {
  if (from == to) return false;
  return to == Node::SCHEDULER || (from == Node::WORKER && to == Node::SERVER);
}

// Whether the servers of these two ranks have a link, in a ring of so many.
inline bool AreNeighbors(int one, int other, int servers) {
  if (one == other || servers < 2) return false;
  return (one + 1) % servers == other || (other + 1) % servers == one;
}

// Which of two neighbors makes it: with two servers there would be two links else.
inline bool DialsNeighbor(int self, int other) { return self < other; }

// Whether anybody connects to a node of this role, which listens then.
inline bool Listens(Node::Role role) { return role != Node::WORKER; }

// Whether a node may call itself a worker of the job by this id.
inline bool IsWorkerId(int node_id) {
  return node_id != Node::kEmpty && node_id > 8 && node_id % 2 == 1;
}

// Or a server.
inline bool IsServerId(int node_id) { return node_id >= 8 && node_id % 2 == 0; }

}  // namespace ps
#endif  // BYTEPS_NET_LINK_WHO_CONNECTS_H_
