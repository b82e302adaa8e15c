// Probes: a node asks whether it would be admitted, and nothing changes.
#include <algorithm>
#include <cstring>
#include <utility>

#include "byteps/base/mutex.h"
#include "byteps/net/link/node_text.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/protocol.h"
#include "dmlc/logging.h"
#include "ps/internal/postoffice.h"

namespace ps {

std::string Membership::VerdictOnProbe(const Node& asked, const Claim& claim, bool* later) {
  Node node = asked;
  std::string reason = Assign(claim, &node, later);
  if (!reason.empty() || claim.probe == 1) return reason;
  if (node.role == Node::SERVER || asked.aux_id < 0) {
    const bool server = node.role == Node::SERVER;
    const int expected = server ? expected_servers_ : expected_workers_;
    const int room = expected < 0 ? claim.probe : expected - Count(node.role);
    if (claim.probe <= room) return "";
    *later = false;
    return "the job has room for " + Plural(room, server ? "more server" : "more worker") +
           ", and this machine has " + std::to_string(claim.probe);
  }
  // Those that follow the first; none is looked at beyond one that would be refused.
  const int first = node.aux_id;
  for (int i = 1; i < claim.probe && reason.empty(); ++i) {
    node.aux_id = first + i;
    reason = Assign(claim, &node, later);
  }
  return reason;
}

void Membership::AnswerProbe(const Node& node, const Claim& claim) {
  std::string reason;
  std::string counts;
  bool later = false;
  {
    MutexLock lock(&mu_);
    reason = VerdictOnProbe(node, claim, &later);
    const auto of = [](int there, int expected, const char* noun) {
      return expected < 0 ? Plural(there, noun)
                          : std::to_string(there) + " of " + Plural(expected, noun);
    };
    counts = of(Count(Node::SERVER), expected_servers_, "server") + " and " +
             of(Count(Node::WORKER), expected_workers_, "worker");
  }
  PS_VLOG(1) << Describe(node)
             << " asked whether it would be admitted: " << (reason.empty() ? "yes" : reason);
  if (reason.empty()) return SendAway(node, membership::kWould + counts + " are there");
  SendAway(node, (later ? membership::kAgain : "") + Describe(node) + " would be refused by the " +
                     SchedulerName() + ": " + reason + " (" + counts + " are there)");
}

bool Membership::OnProbeAnswer(const std::string& body) {
  if (settings_.probe == 0) return false;
  MutexLock lock(&mu_);
  if (state_ != State::kJoining) return true;
  state_ = State::kFailed;
  failure_ = body;
  for (const char* prefix : {membership::kWould, membership::kAgain}) {
    if (body.compare(0, strlen(prefix), prefix) != 0) continue;
    failure_ = body.substr(strlen(prefix));
    (prefix == membership::kWould ? would_be_admitted_ : come_again_) = true;
  }
  cond_.NotifyAll();
  return true;
}

}  // namespace ps
