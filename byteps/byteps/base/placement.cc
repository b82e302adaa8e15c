#include "byteps/base/placement.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>

namespace byteps {
namespace core {

KeyHash ParseKeyHash(const std::string& name) {
  return name == "djb2" ? KeyHash::kDjb2 : KeyHash::kRaw;
}

int ServerOf(KeyHash hash, uint64_t key, uint64_t placement, uint64_t index, int num_servers) {
  const uint64_t k = static_cast<uint64_t>(num_servers);
  if (hash == KeyHash::kRaw) return static_cast<int>((placement % k + index) % k);
  uint64_t h = 5381;
  for (char c : std::to_string(key + index)) h = h * 33 + static_cast<unsigned char>(c);
  return static_cast<int>(h % k);
}

uint32_t PartitionBytes(DType dtype, uint64_t bytes, int num_servers, double link_bytes_per_s,
                        uint32_t smallest, uint32_t largest) {
  const uint64_t unit = IsBlock(dtype) ? kBlocksOfPartition * SizeOf(dtype) : sysconf(_SC_PAGESIZE);
  const auto whole = [unit](uint64_t n) { return (n + unit - 1) / unit * unit; };
  const uint64_t pieces =
      std::min(kPartitionsPerServer * static_cast<uint64_t>(num_servers), kMaxPartitions);
  const double a_server = static_cast<double>(bytes) / num_servers;
  const auto worth = static_cast<uint64_t>(sqrt(a_server * link_bytes_per_s * kPartitionSeconds));
  const uint64_t wanted = whole(std::max((bytes + pieces - 1) / pieces, worth));
  // Less than a unit, where no partition may be so long.
  const uint64_t most =
      largest >= unit ? largest / unit * unit : largest / SizeOf(dtype) * SizeOf(dtype);
  uint64_t least = smallest;
  if (least == 0) {
    const double carried = link_bytes_per_s * kShortestSeconds;
    least = link_bytes_per_s == 0 || carried > kMostSmallest ? kMostSmallest
                                                             : static_cast<uint64_t>(carried);
    least = std::max(least, kLeastSmallest);
  }
  least = std::min(whole(least), most);
  return static_cast<uint32_t>(std::min(std::max(wanted, least), most));
}

}  // namespace core
}  // namespace byteps
