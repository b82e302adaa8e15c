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

// Locked by its owner.
class Outbox {
 public:
  void Push(OutgoingPtr message);

  // ----- messages that wait, in order
  bool has_next() const { return !waiting_.empty(); }
  OutgoingPtr TakeNext();
  // The device did not take it.
  void PutBack(OutgoingPtr message) { waiting_.push_front(std::move(message)); }

  // ----- rendezvous
  uint32_t NewId() { return ++last_id_; }
  // The receiver has been asked where to write it.
  void Asked(uint32_t id, OutgoingPtr message) { asked_[id] = std::move(message); }
  // And has answered.  False: it was not asked.
  bool Answered(uint32_t id, const Target& target);
  // Or had offered this place before.
  void WriteTo(const Target& target, OutgoingPtr message);
  // The one to be written, or null.
  Outgoing* writing() { return writes_.empty() ? nullptr : writes_.front().get(); }
  const Outgoing* writing() const { return writes_.empty() ? nullptr : writes_.front().get(); }
  OutgoingPtr TakeWritten();

  // ----- places that the receiver has offered for answers

  void Keep(const Exchange& exchange, const Offer& offer);
  // Once for each.  False: there is none.
  bool TakeOffer(const Exchange& exchange, Offer* offer);
  bool HasOffer(const Exchange& exchange) const { return offers_.count(exchange) > 0; }
  // Messages that wait offer none of these bytes.
  void Withdraw(const char* begin, uint64_t bytes);

  // ----- messages whose last request the device has

  // It tells, in this order, when they have arrived.
  void Sent(OutgoingPtr message);
  // The next ones have, so many.
  void Arrived(uint64_t messages, OutgoingList* done) {
    log_.Arrived(log_.arrived() + messages, done);
  }

  // ----- a connection that broke

  // It is gone: what this side had begun to send waits again, before all that it had not.
  void Interrupt();
  // There is another one, and the other end has received so many messages.  What it lacks goes
  // before all others.  Throws Error where this cannot be.
  void Resume(uint64_t received, OutgoingList* done);
  // Messages that are sent once more, since this was asked.
  size_t TakeBegunAgain();

  // ----- the end

  // Messages that are known to this side alone.
  void TakeUnsent(OutgoingList* done);
  // And those that were sent: the device must be done with them.
  void TakeSent(OutgoingList* done);

  // Whether nothing is left to be sent.
  bool empty() const { return waiting_.empty() && asked_.empty() && writes_.empty(); }
  // And all that was sent is known to have arrived.
  bool all_arrived() const { return empty() && log_.empty(); }
  // Of what is left.
  size_t bytes() const { return bytes_; }

 private:
  std::deque<OutgoingPtr> waiting_;
  std::map<uint32_t, OutgoingPtr> asked_;  // by id
  std::deque<OutgoingPtr> writes_;         // the receiver has said where to
  std::map<Exchange, Offer> offers_;
  // Whose request the device has, or has given back without a word of the other end's.
  ReplayLog<OutgoingPtr> log_;
  uint32_t last_id_ = 0;
  size_t bytes_ = 0;
  size_t begun_again_ = 0;
};

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_OUTBOX_H_
