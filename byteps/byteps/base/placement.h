// How tensors are cut, and which server sums which partition.
#ifndef BYTEPS_BASE_PLACEMENT_H_
#define BYTEPS_BASE_PLACEMENT_H_

#include <cstdint>
#include <string>

#include "byteps/base/dtype.h"
#include "byteps/base/protocol.h"

namespace byteps {
namespace core {

// `name` is one of the table's choices.
KeyHash ParseKeyHash(const std::string& name);

// The server, 0..num_servers-1, of partition `index` of the tensor with `key`
// (Declaration::Key).
//
// kRaw deals partitions round robin from the tensor's `placement`: a caller that
// gives each tensor the number of partitions before it spreads small tensors and
// the parts of large ones evenly over any number of servers.  kDjb2 hashes the
// partition's key, whatever its neighbours are.
int ServerOf(KeyHash hash, uint64_t key, uint64_t placement, uint64_t index, int num_servers);

// Bytes of the partitions of a tensor of `bytes` bytes.
//
// All workers push a partition at the same time, so a server has its sum only when
// it has received it from all, and the links back idle until then.  To keep that
// time small compared with the whole, a server gets many partitions of a tensor,
// kPartitionsPerServer of them, as long as they are neither smaller nor larger
// than the given limits.  No more than kMaxPartitions, if the greatest size allows it.
// Limits are whole pages, and so is the result.  Partitions of blocks are multiples of
// kBlocksOfPartition blocks, which are whole pages of 4 KiB; where the greatest size is less than
// that, as many whole blocks as it holds.
//
// `smallest` 0: what the link carries in kShortestSeconds, within kLeastSmallest and kMostSmallest,
// which is also the one for a link that is not known.  All of a tensor waits once for its first
// partition and once for its last.  On a link of 100 Mbit/s one of 128 KiB takes 10 ms.
//
// On fast links they are longer.  Cores take some time for each partition, of which
// kPartitionSeconds are not hidden behind the links; and links idle for as long as they carry one.
// Of n bytes per server the sum of both is least with partitions of
// sqrt(n * rate * kPartitionSeconds) bytes.  `link_bytes_per_s`: of a worker; 0: not known.
constexpr uint64_t kPartitionsPerServer = 64;
constexpr double kPartitionSeconds = 2e-6;
constexpr double kShortestSeconds = 2.5e-3;
constexpr uint64_t kLeastSmallest = 32 << 10;
constexpr uint64_t kMostSmallest = 128 << 10;
constexpr uint32_t kBlocksOfPartition = 2048;
uint32_t PartitionBytes(DType dtype, uint64_t bytes, int num_servers, double link_bytes_per_s,
                        uint32_t smallest, uint32_t largest);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_BASE_PLACEMENT_H_
