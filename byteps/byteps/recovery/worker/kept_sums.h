// KeptSums: sums that other members may need when a server is lost (docs/design/losses.md).
#ifndef BYTEPS_RECOVERY_WORKER_KEPT_SUMS_H_
#define BYTEPS_RECOVERY_WORKER_KEPT_SUMS_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/device/pinned_pool.h"
#include "byteps/engine/tensor.h"

namespace byteps {
namespace core {

// Sum of a partition, as this worker has received it.
struct KeptSum {
  TensorPtr tensor;
  uint64_t index = 0;
  uint32_t round = 0;
  uint64_t serial = 0;  // the sum's serial at its server; 0: the sum has none
  SharedBytes values;   // empty if this worker wanted only a part of the sum
  std::string lacks;    // PackMembers of the members that the sum lacks
};

// Thread-safe.
class KeptSums {
 public:
  explicit KeptSums(int num_servers) : servers_(num_servers) {}

  void Keep(int server, KeptSum sum);
  // Drops the sums of this partition's rounds before `before`, because all members have ended them.
  void Drop(int server, const Tensor& tensor, uint64_t index, uint32_t before);
  // Drops the sums of this server with lower serials, because all members have them.
  void DropBefore(int server, uint64_t serial);
  // Sets the serial under which a successor has this sum; 0: no member needs the sum.
  void SetSerial(int server, uint64_t partition, uint32_t round, uint64_t serial);
  // Forgets the serials of a lost server, which are meaningless on its successor.
  void ForgetSerials(int server);
  // Drops the sums of a tensor that every member has released.
  void DropAll(int server, const Tensor& tensor);
  // Returns the sums of a server's partitions. Of one partition, older rounds come first.
  std::vector<KeptSum> Of(int server);
  bool Has(int server);
  uint64_t bytes();

 private:
  using Key = std::pair<uint64_t, uint32_t>;  // partition and round
  struct Server {
    std::map<Key, KeptSum> sums;
    std::map<uint64_t, Key> serials;
  };
  using Sums = std::map<Key, KeptSum>;

  // Removes a sum, and returns the next one.
  Sums::iterator Take(Server* server, Sums::iterator it, std::vector<KeptSum>* gone)
      PS_REQUIRES(mu_);

  ps::Mutex mu_;
  std::vector<Server> servers_ PS_GUARDED_BY(mu_);
  uint64_t bytes_ PS_GUARDED_BY(mu_) = 0;
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_RECOVERY_WORKER_KEPT_SUMS_H_
