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
#endif  // BYTEPS_NET_RDMA_INBOX_H_
