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

// A message received by rendezvous: its values wait for memory, or are being written.
struct Incoming {
  uint32_t id = 0;  // the sender's id of the message
  Received parts;
  std::vector<uint64_t> sizes;
  uint64_t value_bytes = 0;
  uint32_t meta_in_region = 0;  // bytes of meta, if it is in the region
  bool asked = false;           // the owner was asked for the destination
  char* place = nullptr;        // the value's destination; null: pooled memory
  bool drop = false;            // abandoned
  Memory memory;
  bool is_cleared = false;   // the peer knows where to write
  bool was_offered = false;  // the memory was offered before the peer asked

  uint64_t bytes() const { return AlignUp(meta_in_region, kRegionAlign) + value_bytes; }
};

// Messages received by rendezvous: waiting for memory, and being written.
//
// Independent of devices, to be tested without any. Not thread-safe: its owner locks it.
class Inbox {
 public:
  // Counts a completely received message, of any kind.
  void Came() { ++received_; }
  uint64_t received() const { return received_; }

  // ----- messages that wait for memory, in order

  void Wait(Incoming incoming) { waiting_.push_back(std::move(incoming)); }
  bool any_waits() const { return !waiting_.empty(); }
  // Returns whether a thread may look for memory for the first message: the others with memory
  // leave room in `window`. A single message may exceed `window`.
  bool MayClear(uint64_t window) const;
  // A thread looks for memory for the first message, which therefore stays first.
  void BeginClearing() { clearing_ = true; }
  bool is_clearing() const { return clearing_; }
  Incoming* first() { return &waiting_.front(); }
  // The first message has memory; its sender is to be told.
  void EndClearing(Memory memory);

  // ----- messages with memory, each with a cookie

  bool any_to_tell() const { return !to_tell_.empty(); }
  // Returns where the sender of the next message shall write. `id`: the sender's id of the message.
  Target Tell(uint32_t* id);
  // Takes a completely written message. Returns false if its sender was not told to write.
  bool Take(uint32_t cookie, Incoming* incoming);

  // ----- destinations for answers

  // Returns the offer of this destination for the peer. `rkey`: the device's.
  Offer MakeOffer(const Exchange& exchange, const Place& place, uint32_t rkey);
  // The peer writes an answer into an offered destination. Returns false if it was not offered, or
  // for another size.
  bool BeginOffered(const Exchange& exchange, uint32_t cookie, Incoming incoming);
  // The answer has arrived, by whatever path.
  void EndOffer(const Exchange& exchange) { offered_.erase(exchange); }
  bool IsOffered(const char* begin, uint64_t bytes) const;

  // ----- abandoned memory

  // Drops messages for this memory. Returns whether messages now wait for other memory, because
  // their senders do not know of this yet.
  bool Abandon(const char* begin, uint64_t bytes);
  // Returns whether the device may write there.
  bool IsWrittenTo(const char* begin, uint64_t bytes) const;

  // The connection is gone: incomplete messages will be sent again from the beginning.
  void Forget();
  // Tells no more senders to write. Memory being written stays until the device is done.
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
    bool drop = false;  // abandoned
  };
  std::map<Exchange, Offered> offered_;
  uint32_t last_cookie_ = 0;
};

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_INBOX_H_
