#include "byteps/net/link/link_outage.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#include "byteps/base/log.h"
#include "byteps/net/link/net_address.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace {

// Time that the scheduler waits for a node whose connection was closed. The node's process has
// almost certainly ended: otherwise only a device in the network could close the connection.
constexpr auto kClosedPatience = std::chrono::milliseconds(500);
// Time that the scheduler waits for a node whose connection broke: the process or the network may
// have failed. A live node tries to connect every 1.5 s.
constexpr auto kBrokenPatience = std::chrono::seconds(5);
// Bytes that every host accepts in one packet (RFC 791, 3.1).
constexpr uint64_t kSmallPacketBytes = 576;
std::atomic<uint64_t> reconnections{0};

}  // namespace

std::chrono::steady_clock::duration LinkPatience(int peer, bool is_scheduler, double reconnect_s,
                                                 LinkFault fault) {
  // A peer outside the job, or one that has left it, counts as lost at once.
  if (peer == Node::kEmpty || peer >= kRefusedBase) return {};
  const auto limit = ToDuration(reconnect_s);
  // Only the scheduler must notice dead processes soon; it informs the other nodes.
  if (!is_scheduler || fault == LinkFault::kSilent) return limit;
  if (fault == LinkFault::kClosed)
    return std::min<LinkOutage::Clock::duration>(limit, kClosedPatience);
  return std::min<LinkOutage::Clock::duration>(limit, kBrokenPatience);
}

LinkOutage LinkOutage::Of(const std::string& reason, LinkFault fault, Clock::duration patience,
                          double reconnect_s) {
  LinkOutage outage;
  outage.reason = reason;
  outage.fault = fault;
  outage.begin = Clock::now();
  outage.deadline = outage.begin + patience;
  outage.briefly = patience < ToDuration(reconnect_s);
  return outage;
}

std::string LinkOutage::GivenUp(double reconnect_s, const std::string& last_error) const {
  if (listener_gone || (briefly && fault == LinkFault::kClosed)) return reason;
  if (briefly) return reason + ", and it did not connect again";
  const std::string limit = Limit(reconnect_s, "BYTEPS_RECONNECT_TIMEOUT_S");
  if (last_error.empty() && unacknowledged > 0) {
    return reason + ", and was made again, but of " + Unacknowledged() + " within " + limit +
           LargePacketsVanish();
  }
  return reason + ", and could not be made again within " + limit +
         (last_error.empty() ? "" : ": " + last_error);
}

std::string LinkOutage::Refused(const std::string& refusal) const {
  const std::string hint = LargePacketsVanish();
  return hint.empty() ? refusal : refusal + "; of " + Unacknowledged() + hint;
}

std::string LinkOutage::Unacknowledged() const {
  return std::to_string(unacknowledged) + " bytes that were sent since none was acknowledged";
}

std::string LinkOutage::LargePacketsVanish() const {
  if (unacknowledged <= kSmallPacketBytes) return "";
  return ": small packets pass (a greeting did), and large ones do not; compare the MTU of both "
         "hosts with that of the switches and tunnels between them (ip link; ping -M do -s SIZE)";
}

void LogResumed(const std::string& which, int peer, const std::string& address,
                LinkOutage::Clock::duration after, size_t again) {
  ++reconnections;
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(after).count();
  BPS_LOG(WARNING) << which << " with "
                   << (peer == kScheduler ? "the scheduler" : RoleAndRank(peer))
                   << (address.empty() ? "" : " (" + address + ")")
                   << " broke, and was made again after " << ms
                   << " ms; messages sent again: " << again;
}

uint64_t Reconnections() { return reconnections; }

void LogAway(int peer, const std::string& home, const std::string& why, const std::string& path) {
  BPS_LOG(WARNING) << "no connection with " << RoleAndRank(peer) << " from " << home
                   << (why.empty() ? "" : " (" + why + ")") << ": " << path << " is used instead";
}

void LogHome(int peer, const std::string& home) {
  BPS_LOG(WARNING) << "data for " << RoleAndRank(peer) << " goes from " << home << " again";
}

}  // namespace ps
