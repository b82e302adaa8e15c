// What an endpoint has to send: messages that wait, those whose receiver was asked where to write,
// those that are being written, and those that were sent and may have to be sent again.
//
// It knows no device, so that it runs in a test without one.
#ifndef BYTEPS_NET_RDMA_OUTBOX_H_
#define BYTEPS_NET_RDMA_OUTBOX_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "byteps/net/link/replay_log.h"
#include "byteps/net/rdma/wire.h"
#include "ps/sarray.h"

namespace ps {
namespace rdma {

class Region;

// A packed message, with its values where the device can read them.
struct Outgoing {
  std::string meta;
  std::vector<SArray<char>> values;
  std::vector<uint64_t> sizes;  // of the values, also when they have been copied
  uint64_t value_bytes = 0;
  uint64_t key = 0;  // for errors

  // Sent by rendezvous, from this memory.  A meta that no slot can hold is in front.
  bool in_region = false;
  bool meta_in_region = false;
  const char* address = nullptr;
  uint64_t length = 0;
  const Region* keys = nullptr;    // of this memory: the next one, or the pool's
  std::shared_ptr<Region> region;  // of the value where it lies; goes before it does
  SArray<char> copy;               // or a copy of all

  // Where the receiver wants it, and how much is in flight.
  uint64_t remote_address = 0;
  uint32_t remote_key = 0;
  uint32_t cookie = 0;
  uint64_t written = 0;
  bool is_counted = false;  // among those that were sent; it may be sent again

  uint64_t bytes() const { return meta.size() + value_bytes; }
  // "the message of key 0x1a0000, 4096000 bytes"
  std::string Describe() const;
};
using OutgoingPtr = std::unique_ptr<Outgoing>;
// Messages that nobody sends any more, to be let go of without a lock.
using OutgoingList = std::vector<OutgoingPtr>;

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
  // The one to be written, or null.
  Outgoing* writing() { return writes_.empty() ? nullptr : writes_.front().get(); }
  const Outgoing* writing() const { return writes_.empty() ? nullptr : writes_.front().get(); }
  OutgoingPtr TakeWritten();

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
  // Whose request the device has, or has given back without a word of the other end's.
  ReplayLog<OutgoingPtr> log_;
  uint32_t last_id_ = 0;
  size_t bytes_ = 0;
  size_t begun_again_ = 0;
};

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_OUTBOX_H_
