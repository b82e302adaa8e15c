#ifndef BYTEPS_NET_RDMA_OUTBOX_H_
#define BYTEPS_NET_RDMA_OUTBOX_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>

#include "byteps/net/link/replay_log.h"
#include "byteps/net/rdma/queues.h"
#include "byteps/net/rdma/wire.h"

namespace ps {
namespace rdma {

// Messages that an endpoint sends. A message first waits. It may then ask the receiver for a
// destination, and is written. It is kept until the receiver has it, because it may have to be sent
// again.
class Outbox {
 public:
  void Push(OutgoingPtr message);

  // ----- waiting messages, in order
  bool has_next() const { return !waiting_.empty(); }
  OutgoingPtr TakeNext();
  // Puts back a message that the device refused.
  void PutBack(OutgoingPtr message) { waiting_.push_front(std::move(message)); }

  // ----- rendezvous
  uint32_t NewId() { return ++last_id_; }
  // Records that the receiver was asked for a destination of this message.
  void Asked(uint32_t id, OutgoingPtr message) { asked_[id] = std::move(message); }
  // Takes the destination that the receiver has named. Returns false if the receiver was not asked
  // for one.
  bool Answered(uint32_t id, const Target& target);
  // Uses a destination that the receiver had already offered.
  void WriteTo(const Target& target, OutgoingPtr message);
  // Returns the message to write next, or null.
  Outgoing* writing() { return writes_.empty() ? nullptr : writes_.front().get(); }
  const Outgoing* writing() const { return writes_.empty() ? nullptr : writes_.front().get(); }
  OutgoingPtr TakeWritten();

  // ----- destinations that the receiver has offered for answers

  void Keep(const Exchange& exchange, const Offer& offer);
  // Takes the offer for this answer, because an offer is used only once. Returns false if there is
  // none.
  bool TakeOffer(const Exchange& exchange, Offer* offer);
  bool HasOffer(const Exchange& exchange) const { return offers_.count(exchange) > 0; }
  // Removes offers of these bytes from waiting messages.
  void Withdraw(const char* begin, uint64_t bytes);

  // ----- messages whose last request the device has

  // Adds a message. Arrivals are reported in the order of these calls.
  void Sent(OutgoingPtr message);
  // Handles the arrival of the first `messages` messages of the log.
  void Arrived(uint64_t messages, OutgoingList* done) {
    log_.Arrived(log_.arrived() + messages, done);
  }

  // ----- broken connections

  // Puts messages whose sending has begun back to the front of the waiting messages, because the
  // connection is gone.
  void Interrupt();
  // Continues on a new connection. `received`: number of messages that the peer has received in
  // all. The messages that the peer is missing go to the front of the waiting messages. Throws
  // Error if the number is impossible.
  void Resume(uint64_t received, OutgoingList* done);
  // Returns the number of messages sent again since the last call.
  size_t TakeBegunAgain();

  // ----- the end

  // Takes messages of which the device has no request.
  void TakeUnsent(OutgoingList* done);
  // Takes sent messages. The device must be done with them.
  void TakeSent(OutgoingList* done);

  // Returns whether nothing is left to send.
  bool empty() const { return waiting_.empty() && asked_.empty() && writes_.empty(); }
  // Returns whether nothing is left to send, and the peer has received all messages.
  bool all_arrived() const { return empty() && log_.empty(); }
  // Number of bytes left to send.
  size_t bytes() const { return bytes_; }

 private:
  std::deque<OutgoingPtr> waiting_;
  std::map<uint32_t, OutgoingPtr> asked_;  // by id
  std::deque<OutgoingPtr> writes_;         // messages that have a destination
  std::map<Exchange, Offer> offers_;
  // Messages that the device has, or has returned without an acknowledgement.
  ReplayLog<OutgoingPtr> log_;
  uint32_t last_id_ = 0;
  size_t bytes_ = 0;
  size_t begun_again_ = 0;
};

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_OUTBOX_H_
