#ifndef BYTEPS_NET_LINK_OUTAGE_WATCH_H_
#define BYTEPS_NET_LINK_OUTAGE_WATCH_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "byteps/net/link/link_outage.h"

namespace ps {

// Outage of a link: its deadline, and the reason to report if the outage is not over by then. An
// outage may span several connections.
//
// A new connection alone does not end the outage, because a path may carry a greeting and nothing
// larger. The outage ends when the peer has acknowledged bytes that were sent over the new
// connection, or when the transport knows otherwise that the connection works.
//
// Not thread-safe: the link locks this object, or uses it in a single thread.
class OutageWatch {
 public:
  using Clock = LinkOutage::Clock;

  // `reconnect_s`: BYTEPS_RECONNECT_TIMEOUT_S.
  explicit OutageWatch(double reconnect_s) : reconnect_s_(reconnect_s) {}

  // Begins an outage when the connection broke. The link may be without a connection for
  // `patience`, of which `counted` has already passed in silence. `by_peer`: whether the peer
  // closed the connection. If the previous outage is not over, it continues, with the earlier of
  // the two deadlines. Returns whether the deadline has changed.
  bool Begin(const std::string& reason, LinkFault fault, bool by_peer, Clock::duration patience,
             Clock::duration counted);

  // Continues with a new connection, over which `again` messages are sent again. The peer is alive,
  // so the outage may last for the full time.
  void AwaitProof(size_t again);
  // Records that the peer has acknowledged, over the new connection, messages that were sent over
  // the previous one. So the previous connection worked.
  void HearProofOfTheLast();
  // Returns the time until which the newest connection may still prove that it works. The link is
  // lost if that time has passed. Call when the deadline has passed.
  Clock::time_point ChanceUntil() const;
  void PostponeTo(Clock::time_point deadline) { outage_.deadline = deadline; }
  // Notes how many bytes were sent over the new connection without any acknowledgement.
  void NoteUnacknowledged(uint64_t bytes);

  // Ends the outage. Returns how long the link had no connection.
  Clock::duration End();

  // Returns why the link is lost. `last_error`: error of the last attempt to connect; may be "".
  std::string GivenUp(bool listener_gone, const std::string& last_error) const;
  std::string Refused(const std::string& refusal) const { return outage_.Refused(refusal); }

  // Returns whether the outage continues.
  bool lasts() const { return lasts_; }
  // Returns whether there is a new connection that has not proved yet that it works.
  bool awaits_proof() const { return awaits_proof_; }
  bool by_peer() const { return by_peer_; }
  Clock::time_point deadline() const { return outage_.deadline; }
  // Number of the outage, counted from 1.
  uint64_t number() const { return number_; }
  // Number of messages that were sent again over the current connection.
  size_t again() const { return again_; }

 private:
  const double reconnect_s_;
  LinkOutage outage_;  // the latest one
  uint64_t number_ = 0;
  bool lasts_ = false;
  bool by_peer_ = false;
  Clock::time_point longest_;  // the deadline if the peer is known to be alive
  bool awaits_proof_ = false;
  bool continues_ = false;  // whether the last connection broke before it proved that it works
  Clock::time_point resumed_at_;
  size_t again_ = 0;
};

}  // namespace ps
#endif  // BYTEPS_NET_LINK_OUTAGE_WATCH_H_
