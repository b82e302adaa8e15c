#ifndef BYTEPS_NET_LINK_LINK_OUTAGE_H_
#define BYTEPS_NET_LINK_LINK_OUTAGE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "byteps/base/awake_clock.h"

namespace ps {

// A link between two processes, over TCP or RDMA, that broke while both may live: how long
// it may stay broken, and what is said of it.
enum class LinkFault {
  kClosed,  // the other end closed it, or the kernel did so for a process that ended
  kBroken,  // something broke: either end may be gone
  kSilent,  // nothing was acknowledged for a while
};

// What a link that the other end closed says of itself.
constexpr char kLinkClosed[] = "its connection closed";

// A process whose port is closed for so long has ended.
constexpr auto kListenerGoneTime = std::chrono::milliseconds(250);

// For how long the link with the node `peer` may be broken.  Zero: it is lost at once.
// `reconnect_s`: BYTEPS_RECONNECT_TIMEOUT_S.
std::chrono::steady_clock::duration LinkPatience(int peer, bool is_scheduler, double reconnect_s,
                                                 LinkFault fault);

struct LinkOutage {
  using Clock = AwakeClock;

  std::string reason;
  LinkFault fault = LinkFault::kBroken;
  Clock::time_point begin;
  Clock::time_point deadline;
  bool briefly = false;        // it has less time than BYTEPS_RECONNECT_TIMEOUT_S
  bool listener_gone = false;  // nobody listens any more where it was connected to
  // Bytes that were sent since it was made again, of which the other end acknowledged none.
  uint64_t unacknowledged = 0;

  static LinkOutage Of(const std::string& reason, LinkFault fault, Clock::duration patience,
                       double reconnect_s);
  // Why the link is lost.  `last_error`: of the last attempt to connect; may be empty.
  std::string GivenUp(double reconnect_s, const std::string& last_error) const;
  // The same where the other end had given it up before, and said `refusal`.
  std::string Refused(const std::string& refusal) const;

 private:
  std::string Unacknowledged() const;
  std::string LargePacketsVanish() const;  // empty where nothing speaks for it
};

// The line of the log when it is there again.  `which`: "the connection", "data connection 0".
void LogResumed(const std::string& which, int peer, const std::string& address,
                LinkOutage::Clock::duration after, size_t again);

// The line of the log when a link with several pairs of NICs is made again, and not over its first
// one, `home`, which failed for the reason `why` (may be empty): over `path`.
void LogAway(int peer, const std::string& home, const std::string& why, const std::string& path);
// And when it goes back.
void LogHome(int peer, const std::string& home);

}  // namespace ps
#endif  // BYTEPS_NET_LINK_LINK_OUTAGE_H_
