#include "byteps/net/link/outage_watch.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "byteps/net/link/link_outage.h"
#include "byteps/net/link/net_address.h"

namespace ps {
namespace {

// Time for the first acknowledgement over a new connection, or a quarter of
// BYTEPS_RECONNECT_TIMEOUT_S if that is shorter.
constexpr auto kChance = std::chrono::seconds(5);

}  // namespace

bool OutageWatch::Begin(const std::string& reason, LinkFault fault, bool by_peer,
                        Clock::duration patience, Clock::duration counted) {
  LinkOutage next = LinkOutage::Of(reason, fault, patience, reconnect_s_);
  next.deadline -= counted;
  continues_ = std::exchange(awaits_proof_, false);
  if (continues_ && outage_.deadline <= next.deadline) return false;
  lasts_ = true;
  by_peer_ = by_peer;
  if (continues_) {
    next.begin = outage_.begin;
    next.unacknowledged = outage_.unacknowledged;
  } else {
    longest_ = next.begin + ToDuration(reconnect_s_) - counted;
  }
  outage_ = next;
  ++number_;
  return true;
}

void OutageWatch::AwaitProof(size_t again) {
  awaits_proof_ = true;
  again_ = again;
  resumed_at_ = Clock::now();
  outage_.briefly = false;
  outage_.deadline = std::max(outage_.deadline, longest_);
}

void OutageWatch::HearProofOfTheLast() {
  if (continues_) longest_ = Clock::now() + ToDuration(reconnect_s_);
}

OutageWatch::Clock::time_point OutageWatch::ChanceUntil() const {
  return resumed_at_ + std::min<Clock::duration>(kChance, ToDuration(reconnect_s_ / 4));
}

void OutageWatch::NoteUnacknowledged(uint64_t bytes) {
  outage_.unacknowledged = std::max(outage_.unacknowledged, bytes);
}

OutageWatch::Clock::duration OutageWatch::End() {
  lasts_ = awaits_proof_ = false;
  outage_.unacknowledged = 0;
  return resumed_at_ - outage_.begin;
}

std::string OutageWatch::GivenUp(bool listener_gone, const std::string& last_error) const {
  LinkOutage outage = outage_;
  outage.listener_gone = listener_gone;
  return outage.GivenUp(reconnect_s_, last_error);
}

}  // namespace ps
