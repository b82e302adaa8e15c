// A message on its way out, and one that came in.
#ifndef BYTEPS_NET_RDMA_MESSAGE_PARTS_H_
#define BYTEPS_NET_RDMA_MESSAGE_PARTS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "byteps/net/rdma/pool.h"
#include "byteps/net/rdma/wire.h"
#include "ps/internal/message.h"
#include "ps/sarray.h"

namespace ps {
namespace rdma {

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
  uint32_t lkey = 0;
  std::shared_ptr<Region> region;  // of the value where it lies; goes before it does
  SArray<char> copy;               // or a copy of all

  // Where the receiver wants it, and how much is on its way.
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

// Values that are not sent with the message are sent from where they lie: out of the pool,
// out of lasting memory, or registered for as long as it takes.  Small or scattered ones
// are copied, which is cheaper.  Throws dmlc::Error when memory cannot be registered.
OutgoingPtr MakeOutgoing(std::string meta, std::vector<SArray<char>> values, uint64_t key,
                         uint32_t inline_bytes, uint32_t slot_bytes,
                         const std::shared_ptr<Device>& device, Pool* pool);

// The registration of memory for receiving.  `may_block`: it is made if there is none yet,
// and otherwise not waited for.  Null: there is none, or it cannot be had.
std::shared_ptr<Region> RegionToReceive(const void* address, uint64_t bytes, bool may_block,
                                        const std::shared_ptr<Device>& device);

struct Received {
  Message msg;
  uint64_t bytes = 0;      // of its meta and values
  bool is_inline = false;  // the values came in the message's frame
};

// Cuts `region` into values of these sizes, from `offset` on.
std::vector<SArray<char>> Split(const SArray<char>& region, uint64_t offset,
                                const std::vector<uint64_t>& sizes);

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_MESSAGE_PARTS_H_
