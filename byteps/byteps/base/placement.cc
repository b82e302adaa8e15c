#include "byteps/base/placement.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>

namespace byteps {
namespace core {
namespace {

// The same in every build: std::hash is another one in each C++ library.
uint64_t HashOfText(const std::string& text) { return HashBytes(text.data(), text.size(), 0); }

}  // namespace

KeyHash ParseKeyHash(const std::string& name) {
  if (name == "naive") return KeyHash::kNaive;
  if (name == "built_in") return KeyHash::kBuiltIn;
  if (name == "djb2") return KeyHash::kDjb2;
  if (name == "sdbm") return KeyHash::kSdbm;
  return KeyHash::kRaw;
}

int ServerOf(KeyHash hash, uint64_t key, uint64_t placement, uint64_t index, int num_servers) {
  const uint64_t k = static_cast<uint64_t>(num_servers);
  const uint64_t partition_key = key + index;
  uint64_t h = 0;
  switch (hash) {
    case KeyHash::kRaw:
      h = placement % k + index;
      break;
    case KeyHash::kNaive:
      h = ((partition_key >> 16) + (partition_key & 0xffff)) * 9973;
      break;
    case KeyHash::kBuiltIn:
      h = HashOfText(std::to_string(partition_key));
      break;
    case KeyHash::kDjb2:
      h = 5381;
      for (char c : std::to_string(partition_key)) h = h * 33 + static_cast<unsigned char>(c);
      break;
    case KeyHash::kSdbm:
      for (char c : std::to_string(partition_key)) h = h * 65599 + static_cast<unsigned char>(c);
      break;
  }
  return static_cast<int>(h % k);
}

uint32_t PartitionBytes(uint64_t bytes, int num_servers, double link_bytes_per_s, uint32_t smallest,
                        uint32_t largest) {
  const uint64_t page = sysconf(_SC_PAGESIZE);
  const uint64_t pieces =
      std::min(kPartitionsPerServer * static_cast<uint64_t>(num_servers), kMaxPartitions);
  const double a_server = static_cast<double>(bytes) / num_servers;
  const auto worth = static_cast<uint64_t>(sqrt(a_server * link_bytes_per_s * kPartitionSeconds));
  const uint64_t unrounded = std::max((bytes + pieces - 1) / pieces, worth);
  const uint64_t wanted = (unrounded + page - 1) / page * page;
  const uint64_t least = std::min(smallest, largest);
  return static_cast<uint32_t>(std::min<uint64_t>(std::max(wanted, least), largest));
}

}  // namespace core
}  // namespace byteps
