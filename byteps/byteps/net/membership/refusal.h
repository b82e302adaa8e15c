#ifndef BYTEPS_NET_MEMBERSHIP_REFUSAL_H_
#define BYTEPS_NET_MEMBERSHIP_REFUSAL_H_

#include <string>

#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/membership_settings.h"
#include "byteps/net/membership/roster.h"
#include "ps/internal/message.h"

namespace ps {

class RosterPolicy;

namespace membership {

// A scheduler's reason not to admit a node.
struct Refusal {
  std::string reason;  // "": the node is admitted
  bool later = false;  // the node may be admitted later

  explicit operator bool() const { return !reason.empty(); }
};

Refusal CheckProtocol(const Claim& claim);

// Gives `node` a rank and an id, or refuses the node. Does not change the roster. `settings`:
// settings of the scheduler.
Refusal Assign(const Roster& roster, RosterPolicy* policy, const MembershipSettings& settings,
               const Claim& claim, Node* node);

// Returns the refusal, or none, that `claim.probe` nodes like `node` would get, if they registered
// one after another.
Refusal AssignAll(const Roster& roster, RosterPolicy* policy, const MembershipSettings& settings,
                  const Claim& claim, Node node);

}  // namespace membership
}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_REFUSAL_H_
