// Which server sums which partition.
#ifndef BYTEPS_CORE_PLACEMENT_H_
#define BYTEPS_CORE_PLACEMENT_H_

#include <cstdint>
#include <string>

namespace byteps {
namespace core {

// BYTEPS_KEY_HASH_FN.
enum class KeyHash { kRaw, kNaive, kBuiltIn, kDjb2, kSdbm };

// `name` is one of the table's choices.
KeyHash ParseKeyHash(const std::string& name);

// The server, 0..num_servers-1, of partition `index` of the tensor with `key`
// (Declaration::Key).
//
// kRaw deals partitions round robin from the tensor's `placement`: a caller that
// gives each tensor the number of partitions before it spreads small tensors and
// the parts of large ones evenly over any number of servers.  The others hash the
// partition's key and know nothing of its neighbours.
int ServerOf(KeyHash hash, uint64_t key, uint64_t placement, uint64_t index, int num_servers);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_CORE_PLACEMENT_H_
