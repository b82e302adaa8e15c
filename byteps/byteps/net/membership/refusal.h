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

// Why a scheduler does not admit a node to its job.
struct Refusal {
  std::string reason;  // empty: it is admitted
  bool later = false;  // it may be admitted at another time

  explicit operator bool() const { return !reason.empty(); }
};

Refusal CheckProtocol(const Claim& claim);

// Gives `node` its rank and its id, or refuses it.  The roster stays as it is.  `settings`: of the
// scheduler.
Refusal Assign(const Roster& roster, RosterPolicy* policy, const MembershipSettings& settings,
               const Claim& claim, Node* node);

// Whether `claim.probe` nodes like `node` would be admitted, one after the other.
Refusal AssignAll(const Roster& roster, RosterPolicy* policy, const MembershipSettings& settings,
                  const Claim& claim, Node node);

}  // namespace membership
}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_REFUSAL_H_
