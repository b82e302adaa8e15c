#include "byteps/net/membership/protocol.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <sstream>

#include "byteps/net/link/net_address.h"
#include "byteps/net/membership/commands.h"

namespace ps {
namespace membership {
namespace {

// Of each role.  A job that claims to have more is not believed: the scheduler would count them.
constexpr int kMaxNodes = 1 << 20;
// How the LEAVE of a worker begins that will come back, and of one whose process fails.
constexpr char kSuspend[] = "suspend";
constexpr char kWithFailure[] = "failed: ";
// In the LEAVE of a worker in which an operation failed, before what failed.
constexpr char kAfter[] = " after: ";

}  // namespace

std::string PackClaim(const Claim& claim) {
  std::ostringstream text;
  text << "protocol=" << claim.protocol << " workers=" << claim.workers
       << " servers=" << claim.servers << " link=" << claim.link_mbps << " probe=" << claim.probe;
  return text.str();
}

bool ParseClaim(const std::string& text, Claim* claim) {
  // So many digits fit into an int, whatever comes.
  const int found =
      sscanf(text.c_str(), "protocol=%9d workers=%9d servers=%9d link=%9d probe=%9d",
             &claim->protocol, &claim->workers, &claim->servers, &claim->link_mbps, &claim->probe);
  return found == 5 && claim->link_mbps >= 0 && claim->workers <= kMaxNodes &&
         claim->servers <= kMaxNodes && claim->probe >= 0 && claim->probe <= kMaxNodes;
}

std::string PackLink(int mbps) { return "link=" + std::to_string(mbps); }

int ParseLink(const std::string& text) {
  int mbps = 0;
  sscanf(text.c_str(), "link=%9d", &mbps);
  return std::max(mbps, 0);
}

std::string PackFarewell(const Farewell& farewell) {
  if (!farewell.failure.empty()) return kWithFailure + farewell.failure;
  const std::string text = farewell.suspend ? kSuspend : "finish";
  return farewell.error.empty() ? text : text + kAfter + farewell.error;
}

Departure ParseFarewell(const std::string& text, bool errors_count) {
  Departure departure;
  const size_t after = text.find(kAfter);
  if (BeginsWith(text, kStopped)) {
    departure.failure = "was " + text;
  } else if (BeginsWith(text, kWithFailure)) {
    departure.failure = text;
  } else if (errors_count && after != std::string::npos) {
    departure.failure = kWithFailure + text.substr(after + strlen(kAfter));
  } else {
    departure.suspend = BeginsWith(text, kSuspend);
  }
  return departure;
}

std::string PackEnd(bool suspended) { return suspended ? kSuspend : "finish"; }

bool ParseEnd(const std::string& text) { return text == kSuspend; }

void Send(MembershipLinks* links, Control::Command command, int recver, const std::string& body,
          const std::vector<Node>& nodes) {
  Message msg;
  msg.meta.recver = recver;
  msg.meta.control.cmd = command;
  msg.meta.control.node = nodes;
  msg.meta.body = body;
  links->Send(&msg);
}

bool BeginsWith(const std::string& text, const std::string& prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}

std::string NameOfScheduler(const MembershipLinks& links) {
  return "scheduler (" + JoinHostPort(links.scheduler().hostname, links.scheduler().port) + ")";
}

}  // namespace membership
}  // namespace ps
