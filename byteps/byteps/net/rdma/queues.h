// What an endpoint has to send, what it is receiving, and what a device has of it; without a
// device.
#ifndef BYTEPS_NET_RDMA_QUEUES_H_
#define BYTEPS_NET_RDMA_QUEUES_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "byteps/net/link/replay_log.h"
#include "byteps/net/rdma/wire.h"
#include "ps/internal/message.h"
#include "ps/sarray.h"

namespace ps {
namespace rdma {

// The requests in a send queue, and which of them the device tells of.
//
// A completion costs the polling thread more than a small message does, so most requests ask for
// none.  Requests of a queue complete in the order in which they were posted: a completion tells of
// its request and of all before it.  Signalled, which means that they ask for one, are
// - one of 16, or of a quarter of the queue's depth: a full queue always has a signalled request;
// - a write with which half of a window was posted, so that more can be written while the rest is
// in
//   flight, and the end of a large value, whose memory somebody waits for;
// - the end of a message when nothing else would tell that it has arrived: no signalled request is
//   in flight, and the queue is not watched;
// - all, once SignalAll was called.
//
// The last messages before a pause may thus be unsignalled.  So the polling thread, once it has
// heard of a message, watches the queue for a moment (Watch), in which others need not be
// signalled; then it posts a signalled request that does nothing where that is needed (EndWatch).
// The same ends a queue pair that was stopped: a device need not tell of unsignalled requests that
// it had done before.
//
// It knows no device, so that it runs in a test without one.

// Locked by its owner.
class PostedSends {
 public:
  struct Request {
    uint8_t type = 0;           // a FrameType; 0: a write
    uint64_t key = 0;           // of the message
    uint32_t bytes = 0;         // of a write
    bool ends_message = false;  // the next in the log has arrived with it
    bool is_large = false;      // the message, so that its memory is let go of at once
  };

  // What is over with a completion.
  struct Retired {
    uint64_t messages = 0;  // that ended with these requests
    Request last;           // the request of the completion
  };

  // Requests that the queue must hold in addition to `depth`: that which does nothing.
  static constexpr uint32_t kReserved = 1;

  // `window_bytes`: that are written at a time.
  PostedSends(uint32_t depth, uint64_t window_bytes);

  // ----- posting

  bool has_room() const { return in_queue() < depth_; }
  // The number of the next request; they count from 1.
  uint64_t next() const { return last_ + 1; }
  // Memory of its own, until it is over: one of `depth` slots.
  uint32_t next_slot() const { return static_cast<uint32_t>(next() % depth_); }
  // Whether it must be signalled.
  bool MustSignal(const Request& request) const;
  // The device has it.
  void Add(const Request& request, bool signalled);
  // From now on every request is signalled.
  void SignalAll() { signals_all_ = true; }

  // ----- completions

  // The request of this number is over, and so are all before it.  False: there is none.
  bool Retire(uint64_t number, Retired* retired);

  // Whenever completions have been handled.  Whether EndWatch must be called soon.
  bool Watch();
  // Whether messages were sent of whose arrival nothing in the queue will tell.
  bool EndWatch();
  // Whether no completion will tell that the last request is over.
  bool ends_unsignalled() const { return last_ > retired_ && last_ > last_signalled_; }

  bool empty() const { return last_ == retired_; }
  // Of writes that are not known to be over.
  uint64_t bytes() const { return bytes_; }

 private:
  // Of the requests behind the last signalled one.
  struct Unheard {
    uint32_t requests = 0;
    uint64_t messages = 0;
    uint64_t bytes = 0;
  };

  uint64_t in_queue() const { return last_ - retired_; }
  bool signalled_is_in_flight() const { return last_signalled_ > retired_; }
  bool any_unheard() const { return unheard_.messages > 0 && !signalled_is_in_flight(); }

  const uint32_t depth_;
  const uint32_t every_;           // of so many requests one is signalled
  const uint64_t unheard_bytes_;   // fewer are
  std::vector<Request> requests_;  // by number, modulo its size
  uint64_t last_ = 0;
  uint64_t last_signalled_ = 0;
  uint64_t retired_ = 0;
  uint64_t bytes_ = 0;
  Unheard unheard_;
  bool signals_all_ = false;
  bool heard_ = false;  // of messages, since the last Watch
  bool watched_ = false;
};

// What an endpoint has to send: messages that wait, those whose receiver was asked where to write,
// those that are being written, and those that were sent and may have to be sent again.
//
// It knows no device, so that it runs in a test without one.

class Region;

// By which an answer and its request name each other: the op, the key and the number.
using Exchange = std::tuple<int, uint64_t, uint64_t>;

inline Exchange ExchangeOf(const Meta& meta) { return {meta.head, meta.key, meta.addr}; }

// Memory of this process, registered, in which a value belongs.
struct Place {
  char* begin = nullptr;  // null: there is none
  uint64_t bytes = 0;
  std::shared_ptr<Region> region;

  bool Overlaps(const char* other, uint64_t other_bytes) const;
};

// A packed message, with its values where the device can read them.
struct Outgoing {
  std::string meta;
  std::vector<SArray<char>> values;
  std::vector<uint64_t> sizes;  // of the values, also when they have been copied
  uint64_t value_bytes = 0;
  uint64_t key = 0;  // for errors
  Exchange exchange;
  bool is_answer = false;
  Place place;  // of a request: for its answer, until the receiver has been told

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

// What an endpoint is receiving by rendezvous: messages whose values wait for memory, and those
// that are being written into it.
//
// It knows no device, so that it runs in a test without one.

class Region;

struct Received {
  Message msg;
  uint64_t bytes = 0;      // of its meta and values
  bool is_inline = false;  // the values came in the message's frame
};

// Where the device writes.
struct Memory {
  SArray<char> bytes;
  uint32_t rkey = 0;
  std::shared_ptr<Region> region;  // of the place; null: it is the pool's memory
};

// A message whose values wait for memory, or are being written into it.
struct Incoming {
  uint32_t id = 0;  // the sender's number of it
  Received parts;
  std::vector<uint64_t> sizes;
  uint64_t value_bytes = 0;
  uint32_t meta_in_region = 0;  // bytes
  bool asked = false;           // the owner, for the place
  char* place = nullptr;        // where the value belongs; null: wherever there is memory
  bool drop = false;            // it was abandoned
  Memory memory;
  bool is_cleared = false;   // the peer has been told where to write
  bool was_offered = false;  // before it asked

  uint64_t bytes() const { return AlignUp(meta_in_region, kRegionAlign) + value_bytes; }
};

// Locked by its owner.
class Inbox {
 public:
  // Messages that came whole since the beginning, however they came.
  void Came() { ++received_; }
  uint64_t received() const { return received_; }

  // ----- those that wait for memory, in order

  void Wait(Incoming incoming) { waiting_.push_back(std::move(incoming)); }
  bool any_waits() const { return !waiting_.empty(); }
  // Whether a thread may look for memory for the first, of which the messages that have theirs
  // leave room.  One alone may be larger than `window`.
  bool MayClear(uint64_t window) const;
  // A thread is at it: it stays the first.
  void BeginClearing() { clearing_ = true; }
  bool is_clearing() const { return clearing_; }
  Incoming* first() { return &waiting_.front(); }
  // There is memory for it: its sender is to be told.
  void EndClearing(Memory memory);

  // ----- those that have memory; each has a cookie

  bool any_to_tell() const { return !to_tell_.empty(); }
  // Where the sender of the next shall write; `id`: the sender's number of it.
  Target Tell(uint32_t* id);
  // All of it is there.  False: its sender was not told to write.
  bool Take(uint32_t cookie, Incoming* incoming);

  // ----- places for answers

  // What the peer is told of the place; `rkey` is the device's for it.
  Offer MakeOffer(const Exchange& exchange, const Place& place, uint32_t rkey);
  // The peer writes an answer there, from now on.  False: it was not offered, or for another size.
  bool BeginOffered(const Exchange& exchange, uint32_t cookie, Incoming incoming);
  // The answer has come, this way or another.
  void EndOffer(const Exchange& exchange) { offered_.erase(exchange); }
  bool IsOffered(const char* begin, uint64_t bytes) const;

  // ----- memory that is given up

  // Values for it go elsewhere, and their messages are dropped.  Returns whether some wait for
  // other memory, whose senders do not know of it yet.
  bool Abandon(const char* begin, uint64_t bytes);
  // Whether the device may write there.
  bool IsWrittenTo(const char* begin, uint64_t bytes) const;

  // The connection is gone: what had begun to come comes again, and from the beginning.
  void Forget();
  // Nobody will be told any more; what is written to stays until the device is done.
  void StopTelling() { to_tell_.clear(); }

 private:
  uint64_t received_ = 0;
  std::deque<Incoming> waiting_;
  bool clearing_ = false;
  std::deque<uint32_t> to_tell_;                      // cookies
  std::unordered_map<uint32_t, Incoming> receiving_;  // by cookie
  uint64_t bytes_ = 0;                                // of these
  struct Offered {
    uint32_t cookie = 0;
    uint32_t rkey = 0;
    Place place;
    bool drop = false;  // it was abandoned
  };
  std::map<Exchange, Offered> offered_;
  uint32_t last_cookie_ = 0;
};

}  // namespace rdma
}  // namespace ps

#endif  // BYTEPS_NET_RDMA_QUEUES_H_
