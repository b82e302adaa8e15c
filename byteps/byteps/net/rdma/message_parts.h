// The memory of messages: where a device reads and writes their values.
#ifndef BYTEPS_NET_RDMA_MESSAGE_PARTS_H_
#define BYTEPS_NET_RDMA_MESSAGE_PARTS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "byteps/net/rdma/outbox.h"
#include "byteps/net/rdma/pool.h"
#include "ps/sarray.h"

namespace ps {
namespace rdma {

// Values that are not sent with the message are sent from where they lie: out of the pool,
// out of lasting memory, or registered for as long as it takes.  Small or scattered ones
// are copied, which is cheaper.  Throws Error when memory cannot be registered.
OutgoingPtr MakeOutgoing(std::string meta, std::vector<SArray<char>> values, uint64_t key,
                         uint32_t inline_bytes, uint32_t slot_bytes, const Devices& devices,
                         Pool* pool);

// The registration of memory for receiving.  `may_block`: it is made if there is none yet,
// and otherwise not waited for.  Null: there is none, or it cannot be had.
std::shared_ptr<Region> RegionToReceive(const void* address, uint64_t bytes, bool may_block,
                                        const Devices& devices);

// Cuts `region` into values of these sizes, from `offset` on.
std::vector<SArray<char>> Split(const SArray<char>& region, uint64_t offset,
                                const std::vector<uint64_t>& sizes);

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_MESSAGE_PARTS_H_
