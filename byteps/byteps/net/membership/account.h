#ifndef BYTEPS_NET_MEMBERSHIP_ACCOUNT_H_
#define BYTEPS_NET_MEMBERSHIP_ACCOUNT_H_

#include <cstdint>
#include <set>
#include <string>

#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/replica_view.h"

namespace ps {
namespace membership {

// What a node tells a scheduler that goes on with its job after another one has died
// (docs/design/losses.md).
struct Account {
  uint64_t job = 0;      // its number
  int life = 0;          // of the last scheduler that the node has heard; 0: it does not return
  bool is_late = false;  // of a worker: its replica came to a job that ran already
  std::set<int> left;    // ranks of workers that left in order; servers know
  Turns turns;           // of servers' places, as far as it has heard; a server knows its own
  ReplicaView replicas;  // the last that it has heard of; of no replica: none
};
// Stands behind the node's Claim.
std::string PackAccount(const Account& account);
// False: it says nothing that makes sense.  A Claim alone is an account of life 0.
bool ParseAccount(const std::string& text, Account* account);

}  // namespace membership
}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_ACCOUNT_H_
