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
  std::string reason;  // "": admitted
  bool later = false;  // it may be admitted later

  explicit operator bool() const { return !reason.empty(); }
};

Refusal CheckProtocol(const Claim& claim);

// Gives `node` its rank and id, or refuses it. Does not change the roster. `settings`: the
// scheduler's.
Refusal Assign(const Roster& roster, RosterPolicy* policy, const MembershipSettings& settings,
               const Claim& claim, Node* node);

// Returns whether `claim.probe` nodes like `node` would be admitted, one after another.
Refusal AssignAll(const Roster& roster, RosterPolicy* policy, const MembershipSettings& settings,
                  const Claim& claim, Node node);

}  // namespace membership
}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_REFUSAL_H_
