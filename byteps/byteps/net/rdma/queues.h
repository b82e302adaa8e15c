// Messages of an endpoint that exchange their values by rendezvous.
#ifndef BYTEPS_NET_RDMA_QUEUES_H_
#define BYTEPS_NET_RDMA_QUEUES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "ps/internal/message.h"
#include "ps/sarray.h"

namespace ps {
namespace rdma {

// What an endpoint has to send: messages that wait, those whose receiver was asked where to write,
// those that are being written, and those that were sent and may have to be sent again.
//
// It knows no device, so that it runs in a test without one.

class Region;

// By which an answer and its request name each other: the op, the key and the number.
using Exchange = std::tuple<int, uint64_t, uint64_t>;

inline Exchange ExchangeOf(const Meta& meta) { return {meta.head, meta.key, meta.addr}; }

bool Overlap(const char* a, uint64_t a_bytes, const char* b, uint64_t b_bytes);

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

}  // namespace rdma
}  // namespace ps

#endif  // BYTEPS_NET_RDMA_QUEUES_H_
