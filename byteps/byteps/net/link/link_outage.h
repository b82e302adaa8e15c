#ifndef BYTEPS_NET_LINK_LINK_OUTAGE_H_
#define BYTEPS_NET_LINK_LINK_OUTAGE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "byteps/base/awake_clock.h"

namespace ps {

// Kinds of failure of a link while both processes may be alive. The kind decides how long the link
// may stay broken.
enum class LinkFault {
  kClosed,  // the peer closed the link, or the peer's kernel did when the process ended
  kBroken,  // the connection failed; the peer may be gone
  kSilent,  // the peer has acknowledged nothing for too long
};

// Reason to report for a link that the peer closed.
constexpr char kLinkClosed[] = "its connection closed";

// Time for which a port must refuse connections until its process counts as ended.
constexpr auto kListenerGoneTime = std::chrono::milliseconds(250);

// Returns how long a link to node `peer` may stay broken; zero if the link is lost at once.
// `reconnect_s`: BYTEPS_RECONNECT_TIMEOUT_S.
std::chrono::steady_clock::duration LinkPatience(int peer, bool is_scheduler, double reconnect_s,
                                                 LinkFault fault);

struct LinkOutage {
  using Clock = AwakeClock;

  std::string reason;
  LinkFault fault = LinkFault::kBroken;
  Clock::time_point begin;
  Clock::time_point deadline;
  bool briefly = false;        // the limit was shorter than BYTEPS_RECONNECT_TIMEOUT_S
  bool listener_gone = false;  // the peer's port no longer accepts connections
  // Number of bytes sent over the resumed link, if the peer has acknowledged none of them.
  uint64_t unacknowledged = 0;

  static LinkOutage Of(const std::string& reason, LinkFault fault, Clock::duration patience,
                       double reconnect_s);
  // Returns why the link is lost. `last_error`: error of the last attempt to connect; may be "".
  std::string GivenUp(double reconnect_s, const std::string& last_error) const;
  // Returns why the link is lost, if the peer had already given it up and answered `refusal`.
  std::string Refused(const std::string& refusal) const;

 private:
  std::string Unacknowledged() const;
  // Returns text that says that only large packets are lost, or "" if nothing points to that.
  std::string LargePacketsVanish() const;
};

// Logs and counts a resumed link. `which`: e.g. "the connection", "data connection 0". `after`: how
// long the link was broken. `again`: number of messages that are sent again.
void LogResumed(const std::string& which, int peer, const std::string& address,
                LinkOutage::Clock::duration after, size_t again);

// Number of links that were resumed since the process started.
uint64_t Reconnections();

// Logs that a link is resumed over `path`, because its first pair of NICs, `home`, failed for the
// reason `why` (may be "").
void LogAway(int peer, const std::string& home, const std::string& why, const std::string& path);
// Logs that a link has returned to its first pair of NICs.
void LogHome(int peer, const std::string& home);

}  // namespace ps
#endif  // BYTEPS_NET_LINK_LINK_OUTAGE_H_
