#ifndef BYTEPS_NET_RDMA_INBOX_H_
#define BYTEPS_NET_RDMA_INBOX_H_

#include <cstdint>
#include <deque>
#include <map>
#include <unordered_map>
#include <vector>

#include "byteps/net/rdma/queues.h"
#include "byteps/net/rdma/wire.h"

namespace ps {
namespace rdma {

// Message received by rendezvous. Its values wait for memory, or are being written.
struct Incoming {
  uint32_t id = 0;  // the sender's id of the message
  Received parts;
  std::vector<uint64_t> sizes;
  uint64_t value_bytes = 0;
  uint32_t meta_in_region = 0;  // bytes of meta, if it is in the region
  bool asked = false;           // whether the endpoint's owner was asked for the destination
  char* place = nullptr;        // the value's destination; null: pooled memory
  bool drop = false;            // whether the destination was abandoned
  Memory memory;
  bool is_cleared = false;   // whether the peer knows where to write
  bool was_offered = false;  // whether the memory was offered before the peer asked

  uint64_t bytes() const { return AlignUp(meta_in_region, kRegionAlign) + value_bytes; }
};

// Messages received by rendezvous, which wait for memory or are being written.
//
// The inbox calls no device, so tests need none. Not thread-safe: the endpoint locks it.
class Inbox {
 public:
  // Counts a completely received message, of any kind.
  void Came() { ++received_; }
  uint64_t received() const { return received_; }

  // ----- messages that wait for memory, in order

  void Wait(Incoming incoming) { waiting_.push_back(std::move(incoming)); }
  bool any_waits() const { return !waiting_.empty(); }
  // Returns whether a thread may look for memory for the first message: no thread does yet, and the
  // messages that have memory leave room in `window` bytes. One message may exceed `window`.
  bool MayClear(uint64_t window) const;
  // Notes that a thread is about to look for memory for the first message. Until EndClearing, that
  // message stays the first.
  void BeginClearing() { clearing_ = true; }
  bool is_clearing() const { return clearing_; }
  Incoming* first() { return &waiting_.front(); }
  // Gives the first message memory. The next calls of Tell return it for the message's sender.
  void EndClearing(Memory memory);

  // ----- messages with memory, each with a cookie

  bool any_to_tell() const { return !to_tell_.empty(); }
  // Returns the memory to which the sender of the next message must write. Sets `id` to the
  // sender's id of this message.
  Target Tell(uint32_t* id);
  // Takes out a completely written message. Returns false if its sender was not told to write it.
  bool Take(uint32_t cookie, Incoming* incoming);

  // ----- destinations for answers

  // Returns an offer of this destination, to be sent to the peer. `rkey`: remote key of the
  // destination's memory on the connection's device.
  Offer MakeOffer(const Exchange& exchange, const Place& place, uint32_t rkey);
  // Begins an answer that the peer writes into an offered destination. Returns false if the
  // destination was not offered, or was offered for a value of another size.
  bool BeginOffered(const Exchange& exchange, uint32_t cookie, Incoming incoming);
  // Ends the offer, because its answer has arrived, by whatever path.
  void EndOffer(const Exchange& exchange) { offered_.erase(exchange); }
  bool IsOffered(const char* begin, uint64_t bytes) const;

  // ----- abandoned memory

  // Drops messages that are received into this memory. If a message's sender does not know the
  // memory yet, the message waits for other memory instead. Returns whether any message waits.
  bool Abandon(const char* begin, uint64_t bytes);
  // Returns whether the device may write to this memory.
  bool IsWrittenTo(const char* begin, uint64_t bytes) const;

  // Drops incomplete messages when the connection is gone. They are sent again from the start.
  void Forget();
  // Stops telling senders to write. Memory that a sender may be writing stays
  // until the device is done.
  void StopTelling() { to_tell_.clear(); }

 private:
  uint64_t received_ = 0;
  std::deque<Incoming> waiting_;
  bool clearing_ = false;
  std::deque<uint32_t> to_tell_;                      // cookies
  std::unordered_map<uint32_t, Incoming> receiving_;  // by cookie
  uint64_t bytes_ = 0;                                // total of receiving_
  struct Offered {
    uint32_t cookie = 0;
    uint32_t rkey = 0;
    Place place;
    bool drop = false;  // the destination was abandoned
  };
  std::map<Exchange, Offered> offered_;
  uint32_t last_cookie_ = 0;
};

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_INBOX_H_
