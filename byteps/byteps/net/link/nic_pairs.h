// Between which NICs the connections of two nodes go.
#ifndef BYTEPS_NET_LINK_NIC_PAIRS_H_
#define BYTEPS_NET_LINK_NIC_PAIRS_H_

#include <string>
#include <vector>

#include "ps/internal/message.h"

namespace ps {

// From a NIC of this host to one of a peer's.
struct NicPair {
  std::string from;  // the address of this host's; empty: the kernel chooses
  std::string to;    // an address, or a name
};
inline bool operator==(const NicPair& a, const NicPair& b) {
  return a.from == b.from && a.to == b.to;
}

// How many connections it takes at least to use all NICs of both nodes; 1 where one of them has
// told of none.
int LeastConnections(const std::vector<Nic>& from, const std::vector<Nic>& to);

// For each of `count` connections to `peer` the pairs that it may take, the one that it should take
// first.  Each NIC gets connections in proportion to its rate; NICs in different subnets are paired
// only where no two are in the same one, and where the peer is on this host each NIC goes with
// itself.  Of equally good pairs the connections begin with another
// one for each `turn`.  The last pair is always what the kernel chooses.
std::vector<std::vector<NicPair>> PairNics(const std::vector<Nic>& from, const Node& peer,
                                           int count, int turn);

}  // namespace ps
#endif  // BYTEPS_NET_LINK_NIC_PAIRS_H_
