// What a worker has in hand where the job may go on without a server, until another one has its
// place (docs/design/replicas.md): the sums that other members may lack, and which servers nothing
// is sent to meanwhile.
#ifndef BYTEPS_ENGINE_KEPT_SUMS_H_
#define BYTEPS_ENGINE_KEPT_SUMS_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/base/protocol.h"
#include "byteps/engine/declarations.h"

namespace byteps {
namespace core {

// The sum of a partition, as this worker was answered.
struct KeptSum {
  TensorPtr tensor;
  uint64_t index = 0;
  uint32_t round = 0;
  SharedBytes values;  // empty: this worker wanted a part of it alone
  std::string lacks;   // PackMembers of those that it lacks
};

// Any thread may call anything.
class KeptSums {
 public:
  explicit KeptSums(int num_servers) : servers_(num_servers) {}

  void Keep(int server, KeptSum sum);
  // All members have ended the rounds of this partition before this one.
  void Drop(int server, const Tensor& tensor, uint64_t index, uint32_t before);
  // Nobody holds this tensor any more.
  void DropAll(int server, const Tensor& tensor);
  // Those of a server's partitions, the older ones of each first.
  std::vector<KeptSum> Of(int server);
  uint64_t bytes();

 private:
  using Key = std::pair<uint64_t, uint32_t>;  // of the partition, and the round

  ps::Mutex mu_;
  std::vector<std::map<Key, KeptSum>> servers_ PS_GUARDED_BY(mu_);
  uint64_t bytes_ PS_GUARDED_BY(mu_) = 0;
};

struct ServerLoss {
  ServerLoss(bool keeps, bool has_backups, int num_servers)
      : keeps(keeps),
        has_backups(has_backups),
        held(num_servers),
        turns(num_servers),
        gifts(num_servers),
        kept(num_servers) {}

  // Whether a server may be replaced.  If not, nothing of this is used.
  const bool keeps;
  // Whether another server has a copy of its state for optimizers.
  const bool has_backups;
  // To read: from before a request is remembered until it is sent, or not; and while an answer is
  // taken and kept.  So who holds it to write sees each partition in one place.
  ps::SharedMutex mu;
  std::vector<bool> held PS_GUARDED_BY(mu);  // by server: what is sent to it would be lost
  // By server that has come: the number of the requests by which it is told where this worker goes
  // on; and how many of the sums that it was given it has not answered.
  std::vector<uint64_t> turns PS_GUARDED_BY(mu);
  std::vector<size_t> gifts PS_GUARDED_BY(mu);
  uint64_t last_turn PS_GUARDED_BY(mu) = 0;
  // To which these requests go; -1: to one that is lost by now.
  int ServerOf(uint64_t turn) const PS_REQUIRES_SHARED(mu);
  KeptSums kept;
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_ENGINE_KEPT_SUMS_H_
