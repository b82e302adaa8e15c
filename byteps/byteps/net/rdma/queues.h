// Types of messages in an Outbox and an Inbox.
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

class Region;

// Identifies a request and its answer: op, key and number.
using Exchange = std::tuple<int, uint64_t, uint64_t>;

inline Exchange ExchangeOf(const Meta& meta) { return {meta.head, meta.key, meta.addr}; }

bool Overlap(const char* a, uint64_t a_bytes, const char* b, uint64_t b_bytes);

// Registered memory of this process that is a value's destination.
struct Place {
  char* begin = nullptr;  // null: the value has no destination
  uint64_t bytes = 0;
  std::shared_ptr<Region> region;

  bool Overlaps(const char* other, uint64_t other_bytes) const;
};

// Packed message, with values that the device can read.
struct Outgoing {
  std::string meta;
  std::vector<SArray<char>> values;
  std::vector<uint64_t> sizes;  // bytes of each value, kept when the values are copied
  uint64_t value_bytes = 0;
  uint64_t key = 0;  // for errors
  Exchange exchange;
  bool is_answer = false;
  Place place;  // destination for the answer to this request, until the receiver knows it

  // in_region: whether the message is sent by rendezvous, from the memory at `address`.
  // meta_in_region: whether the meta is too large for a slot, and precedes the values in that
  // memory.
  bool in_region = false;
  bool meta_in_region = false;
  const char* address = nullptr;
  uint64_t length = 0;
  const Region* keys = nullptr;  // registration of the memory at `address`
  // Registration of a value that is not copied; destroyed before the value.
  std::shared_ptr<Region> region;
  SArray<char> copy;  // copy of all values, if they are copied

  // Destination that the receiver has named, and progress of the write.
  uint64_t remote_address = 0;
  uint32_t remote_key = 0;
  uint32_t cookie = 0;
  uint64_t written = 0;
  bool is_counted = false;  // whether the message is in the log, and may be sent again

  uint64_t bytes() const { return meta.size() + value_bytes; }
  // Returns text such as "the message of key 0x1a0000, 4096000 bytes".
  std::string Describe() const;
};
using OutgoingPtr = std::unique_ptr<Outgoing>;
// Messages that will not be sent. They are destroyed without a lock.
using OutgoingList = std::vector<OutgoingPtr>;

class Region;

struct Received {
  Message msg;
  uint64_t bytes = 0;      // bytes of meta and values
  bool is_inline = false;  // whether the values came in the message's frame
};

// Memory to which the device writes.
struct Memory {
  SArray<char> bytes;
  uint32_t rkey = 0;
  std::shared_ptr<Region> region;  // region of the destination; null: pooled memory
};

}  // namespace rdma
}  // namespace ps

#endif  // BYTEPS_NET_RDMA_QUEUES_H_
