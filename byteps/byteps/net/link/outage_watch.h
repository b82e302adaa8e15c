#ifndef BYTEPS_NET_LINK_OUTAGE_WATCH_H_
#define BYTEPS_NET_LINK_OUTAGE_WATCH_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "byteps/net/link/link_outage.h"

namespace ps {

// The outage of a link, over as many connections as it takes: by when it must be over, and what is
// said of it.
//
// A connection that was made again does not end the outage where its transport can only tell later
// whether it works: it ends when something that was sent over it has been acknowledged.  A path may
// carry a greeting and nothing larger.
//
// Locked by its owner, or of one thread.
class OutageWatch {
 public:
  using Clock = LinkOutage::Clock;

  // `reconnect_s`: BYTEPS_RECONNECT_TIMEOUT_S.
  explicit OutageWatch(double reconnect_s) : reconnect_s_(reconnect_s) {}

  // The connection broke, and the link may be without one for `patience`, of which `counted` has
  // passed already in silence.  `by_peer`: the peer closed it.  Where the last outage is not over,
  // this goes on, until the earlier of both deadlines.  Returns whether the deadline is another
  // one.
  bool Begin(const std::string& reason, LinkFault fault, bool by_peer, Clock::duration patience,
             Clock::duration counted);

  // There is a connection again, over which so many messages are sent again.  That the peer lives
  // was in doubt, and it does: the outage may take as long as any.
  void AwaitProof(size_t again);
  // The peer has got something over the last connection, of which this end did not hear.
  void HearProofOfTheLast();
  // The time is over.  Until when a connection has its chance that is there since a moment; at or
  // before now: it has had it.
  Clock::time_point ChanceUntil() const;
  void PostponeTo(Clock::time_point deadline) { outage_.deadline = deadline; }
  // So many bytes were sent over it, and not acknowledged.
  void NoteUnacknowledged(uint64_t bytes);

  // It is over; the link was without a connection for so long.
  Clock::duration End();

  // Why the link is lost.  `last_error`: of the last attempt to connect; may be empty.
  std::string GivenUp(bool listener_gone, const std::string& last_error) const;
  std::string Refused(const std::string& refusal) const { return outage_.Refused(refusal); }

  // Whether it is not over.
  bool lasts() const { return lasts_; }
  // Whether there is a connection again that has proved nothing yet.
  bool awaits_proof() const { return awaits_proof_; }
  bool by_peer() const { return by_peer_; }
  Clock::time_point deadline() const { return outage_.deadline; }
  // Counts outages.
  uint64_t number() const { return number_; }
  // Messages that are sent again over the connection that is there now.
  size_t again() const { return again_; }

 private:
  const double reconnect_s_;
  LinkOutage outage_;  // the last
  uint64_t number_ = 0;
  bool lasts_ = false;
  bool by_peer_ = false;
  Clock::time_point longest_;  // deadline, if the peer is known to live
  bool awaits_proof_ = false;
  bool continues_ = false;  // the last connection broke before it had proved anything
  Clock::time_point resumed_at_;
  size_t again_ = 0;
};

}  // namespace ps
#endif  // BYTEPS_NET_LINK_OUTAGE_WATCH_H_
