#include "byteps/net/rdma/outbox.h"

#include <string>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/net/rdma/queues.h"

namespace ps {
namespace rdma {
namespace {

// Limit of offers that are kept. An answer whose offer was dropped is sent by a normal rendezvous.
constexpr size_t kMostOffers = 65536;

}  // namespace

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
  offers_.clear();  // the peer forgets its offers, too
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

}  // namespace rdma
}  // namespace ps
