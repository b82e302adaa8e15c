#include "byteps/net/rdma/inbox.h"

#include <algorithm>
#include <string>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/net/rdma/queues.h"

namespace ps {
namespace rdma {

bool Inbox::MayClear(uint64_t window) const {
  if (clearing_ || waiting_.empty()) return false;
  return receiving_.empty() || bytes_ + waiting_.front().bytes() <= window;
}

void Inbox::EndClearing(Memory memory) {
  const uint32_t cookie = ++last_cookie_;
  Incoming& incoming = receiving_[cookie];
  incoming = std::move(waiting_.front());
  waiting_.pop_front();
  incoming.memory = std::move(memory);
  bytes_ += incoming.bytes();
  to_tell_.push_back(cookie);
  clearing_ = false;
}

Target Inbox::Tell(uint32_t* id) {
  Target target;
  target.cookie = to_tell_.front();
  to_tell_.pop_front();
  Incoming& incoming = receiving_.at(target.cookie);
  target.address = reinterpret_cast<uintptr_t>(incoming.memory.bytes.data());
  target.rkey = incoming.memory.rkey;
  incoming.is_cleared = true;
  *id = incoming.id;
  return target;
}

bool Inbox::Take(uint32_t cookie, Incoming* incoming) {
  const auto it = receiving_.find(cookie);
  if (it == receiving_.end() || !it->second.is_cleared) return false;
  *incoming = std::move(it->second);
  receiving_.erase(it);
  BPS_INVARIANT("a window is never below zero", bytes_ >= incoming->bytes(),
                std::to_string(incoming->bytes()) + " bytes came, of " + std::to_string(bytes_));
  bytes_ -= incoming->bytes();
  BPS_INVARIANT("what is abandoned is not written to",
                !incoming->drop || incoming->place == nullptr,
                std::to_string(incoming->value_bytes) + " bytes came for it");
  return true;
}

Offer Inbox::MakeOffer(const Exchange& exchange, const Place& place, uint32_t rkey) {
  const auto [it, is_new] = offered_.emplace(exchange, Offered{++last_cookie_, rkey, place, false});
  BPS_INVARIANT_NOTED("a place is offered once", is_new,
                      std::to_string(place.bytes) + " bytes, as " + std::to_string(last_cookie_));
  return {{reinterpret_cast<uintptr_t>(place.begin), rkey, it->second.cookie}, place.bytes};
}

bool Inbox::BeginOffered(const Exchange& exchange, uint32_t cookie, Incoming incoming) {
  const auto it = offered_.find(exchange);
  if (it == offered_.end() || it->second.cookie != cookie) return false;
  const Place& place = it->second.place;
  if (incoming.sizes.size() != 1 || incoming.bytes() != place.bytes) return false;
  incoming.asked = incoming.is_cleared = incoming.was_offered = true;
  incoming.drop = it->second.drop;
  incoming.place = incoming.drop ? nullptr : place.begin;
  incoming.memory.bytes.reset(place.begin, place.bytes, [](char*) {});
  incoming.memory.rkey = it->second.rkey;
  incoming.memory.region = place.region;
  bytes_ += incoming.bytes();
  receiving_[cookie] = std::move(incoming);
  offered_.erase(it);
  return true;
}

bool Inbox::IsOffered(const char* begin, uint64_t bytes) const {
  return std::any_of(offered_.begin(), offered_.end(),
                     [&](const auto& entry) { return entry.second.place.Overlaps(begin, bytes); });
}

bool Inbox::Abandon(const char* begin, uint64_t bytes) {
  const auto is_meant = [&](const Incoming& incoming) {
    return incoming.place != nullptr && Overlap(incoming.place, incoming.value_bytes, begin, bytes);
  };
  for (auto& entry : offered_) {
    if (entry.second.place.Overlaps(begin, bytes)) entry.second.drop = true;
  }
  for (Incoming& incoming : waiting_) {
    if (!is_meant(incoming)) continue;
    incoming.place = nullptr;
    incoming.drop = true;
  }
  bool moved = false;
  for (auto it = receiving_.begin(); it != receiving_.end();) {
    Incoming& incoming = it->second;
    if (!is_meant(incoming)) {
      ++it;
      continue;
    }
    incoming.drop = true;
    incoming.place = nullptr;
    if (!incoming.memory.region || incoming.is_cleared) {
      ++it;
      continue;
    }
    // The peer does not know this memory yet, so the message can get other memory.
    to_tell_.erase(std::find(to_tell_.begin(), to_tell_.end(), it->first));
    bytes_ -= incoming.bytes();
    incoming.memory = Memory();
    waiting_.push_back(std::move(incoming));
    it = receiving_.erase(it);
    moved = true;
  }
  return moved;
}

bool Inbox::IsWrittenTo(const char* begin, uint64_t bytes) const {
  if (IsOffered(begin, bytes)) return true;
  return std::any_of(receiving_.begin(), receiving_.end(), [&](const auto& entry) {
    const Memory& memory = entry.second.memory;
    return memory.region && Overlap(memory.bytes.data(), memory.bytes.size(), begin, bytes);
  });
}

void Inbox::Forget() {
  receiving_.clear();
  offered_.clear();
  bytes_ = 0;
  waiting_.clear();
  to_tell_.clear();
}

}  // namespace rdma
}  // namespace ps
