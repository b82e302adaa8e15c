#include "byteps/net/rdma/queues.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>

#include "byteps/base/invariant.h"

namespace ps {
namespace rdma {
namespace {

// More save hardly anything, and keep more of the queue from being used again.
constexpr uint32_t kEvery = 16;
constexpr uint32_t kPartsOfDepth = 4;
// Of offers that are kept.  What is not kept is asked for as if it had not been offered.
constexpr size_t kMostOffers = 65536;

bool Overlap(const char* a, uint64_t a_bytes, const char* b, uint64_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

}  // namespace

PostedSends::PostedSends(uint32_t depth, uint64_t window_bytes)
    : depth_(depth),
      every_(std::clamp(depth / kPartsOfDepth, 1u, kEvery)),
      // Two pieces of the four in a window reach it, also where they are whole pages only.
      unheard_bytes_(window_bytes / 8 * 3),
      requests_(depth + kReserved) {}

bool PostedSends::MustSignal(const Request& request) const {
  if (signals_all_ || unheard_.requests + 1 >= every_) return true;
  if (request.bytes > 0 && unheard_.bytes + request.bytes >= unheard_bytes_) return true;
  if (!request.ends_message) return false;
  return request.is_large || !(watched_ || signalled_is_in_flight());
}

void PostedSends::Add(const Request& request, bool signalled) {
  ++last_;
  requests_[last_ % requests_.size()] = request;
  bytes_ += request.bytes;
  if (signalled) {
    last_signalled_ = last_;
    unheard_ = {};
    return;
  }
  ++unheard_.requests;
  unheard_.messages += request.ends_message ? 1 : 0;
  unheard_.bytes += request.bytes;
}

bool PostedSends::Retire(uint64_t number, Retired* retired) {
  *retired = {};
  if (number <= retired_ || number > last_) return false;
  while (retired_ < number) {
    const Request& request = requests_[++retired_ % requests_.size()];
    const uint64_t messages = request.ends_message ? 1 : 0;
    retired->messages += messages;
    bytes_ -= request.bytes;
    if (retired_ <= last_signalled_) continue;
    // It has failed: only then a device tells of one that is not signalled.
    --unheard_.requests;
    unheard_.messages -= messages;
    unheard_.bytes -= request.bytes;
  }
  retired->last = requests_[number % requests_.size()];
  heard_ = heard_ || retired->messages > 0;
  return true;
}

bool PostedSends::Watch() {
  const bool begins = std::exchange(heard_, false) || any_unheard();
  watched_ = watched_ || begins;
  return begins;
}

bool PostedSends::EndWatch() {
  watched_ = false;
  return any_unheard();
}

bool Place::Overlaps(const char* other, uint64_t other_bytes) const {
  return begin != nullptr && Overlap(begin, bytes, other, other_bytes);
}

std::string Outgoing::Describe() const {
  char text[80];
  snprintf(text, sizeof(text), "the message of key 0x%llx, %llu bytes",
           static_cast<unsigned long long>(key), static_cast<unsigned long long>(bytes()));
  return text;
}

void Outbox::Push(OutgoingPtr message) {
  bytes_ += message->bytes();
  waiting_.push_back(std::move(message));
}

OutgoingPtr Outbox::TakeNext() {
  OutgoingPtr next = std::move(waiting_.front());
  waiting_.pop_front();
  return next;
}

bool Outbox::Answered(uint32_t id, const Target& target) {
  const auto it = asked_.find(id);
  if (it == asked_.end()) return false;
  WriteTo(target, std::move(it->second));
  asked_.erase(it);
  return true;
}

void Outbox::WriteTo(const Target& target, OutgoingPtr message) {
  message->remote_address = target.address;
  message->remote_key = target.rkey;
  message->cookie = target.cookie;
  writes_.push_back(std::move(message));
}

void Outbox::Keep(const Exchange& exchange, const Offer& offer) {
  if (offers_.size() < kMostOffers) offers_[exchange] = offer;
}

bool Outbox::TakeOffer(const Exchange& exchange, Offer* offer) {
  const auto it = offers_.find(exchange);
  if (it == offers_.end()) return false;
  *offer = it->second;
  offers_.erase(it);
  return true;
}

void Outbox::Withdraw(const char* begin, uint64_t bytes) {
  for (auto& message : waiting_) {
    if (message->place.Overlaps(begin, bytes)) message->place = {};
  }
}

OutgoingPtr Outbox::TakeWritten() {
  OutgoingPtr whole = std::move(writes_.front());
  writes_.pop_front();
  return whole;
}

void Outbox::Sent(OutgoingPtr message) {
  BPS_INVARIANT_NOTED("bytes queued are those of the messages queued", bytes_ >= message->bytes(),
                      std::to_string(message->bytes()) + " of " + std::to_string(bytes_));
  bytes_ -= message->bytes();
  log_.Add(std::move(message));
}

void Outbox::Interrupt() {
  offers_.clear();  // the peer forgets them, too
  begun_again_ += asked_.size() + writes_.size();
  for (auto it = asked_.rbegin(); it != asked_.rend(); ++it) {
    waiting_.push_front(std::move(it->second));
  }
  asked_.clear();
  for (auto it = writes_.rbegin(); it != writes_.rend(); ++it) {
    (*it)->written = 0;
    waiting_.push_front(std::move(*it));
  }
  writes_.clear();
}

void Outbox::Resume(uint64_t received, OutgoingList* done) {
  auto again = log_.Resume(received, done);
  begun_again_ += again.size();
  for (auto it = again.rbegin(); it != again.rend(); ++it) {
    bytes_ += (*it)->bytes();
    (*it)->written = 0;
    waiting_.push_front(std::move(*it));
  }
}

size_t Outbox::TakeBegunAgain() { return std::exchange(begun_again_, 0); }

void Outbox::TakeUnsent(OutgoingList* done) {
  for (auto& message : waiting_) done->push_back(std::move(message));
  for (auto& entry : asked_) done->push_back(std::move(entry.second));
  waiting_.clear();
  asked_.clear();
}

void Outbox::TakeSent(OutgoingList* done) {
  for (auto& message : log_.TakeAll()) done->push_back(std::move(message));
}

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
    // The peer does not know yet: it gets other memory.
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
