// Decisions of a worker about a tensor before anything is sent: how it is cut, and which server
// sums which partition.
#ifndef BYTEPS_ENGINE_PLAN_H_
#define BYTEPS_ENGINE_PLAN_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/base/protocol.h"
#include "byteps/device/device.h"

namespace byteps {
namespace core {

// A tensor as its owner describes it.
struct TensorSpec {
  std::string name;
  DType dtype = DType::kFloat32;
  uint64_t bytes = 0;
  uint64_t piece_of = 0;  // bytes of the tensor that this one is a piece of, if it is one
  bool average = true;
  bool in_order = false;                             // see Declaration
  bool feedback = false;                             // of blocks: see Declaration
  RankGroup group;                                   // ranks that sum; empty: all workers
  std::optional<uint64_t> placement;                 // none: from the key
  int device = kCpu;                                 // where it lies
  std::shared_ptr<const UpdateRule> rule = nullptr;  // how servers update it, if they do
};

// Any thread, once the link is set; from then on it does not change.
class Plan {
 public:
  Plan(const Config& config, const Launch& launch, int num_servers);

  // Gbit/s each way of the slowest worker's NIC, to which cores copy; the same on all
  // workers.  0: not known.
  void SetLink(double gbps) { link_bytes_per_s_ = gbps * 1e9 / 8; }

  int num_servers() const { return num_servers_; }
  const Launch& launch() const { return launch_; }
  // Bytes of the largest partition that any tensor can have.
  uint32_t largest_partition() const { return largest_partition_; }

  // Bytes of the partitions of a tensor of `bytes` bytes.  Those of a piece are as long as those of
  // the tensor that it is a piece of: each has a cost of its own, and a server has many of all
  // pieces together.
  uint32_t PartitionBytes(DType dtype, uint64_t bytes, uint64_t piece_of = 0,
                          bool updated = false) const;

  // The declaration that servers get.  Throws UsageError when the tensor cannot be summed.
  Declaration Declare(const TensorSpec& spec) const;

  // Places of the partitions, and their priority.
  struct Layout {
    int rank = 0;                 // this worker's
    std::vector<int> servers;     // by partition
    std::vector<uint32_t> order;  // in which this worker pushes them
  };

  // Among the partitions that one round of dealing gives to the servers, each worker begins
  // with a server of its own: else all would send to the same one at once.
  Layout LayOut(const Declaration& declaration) const;

  std::vector<uint64_t> BytesPerServer(const TensorSpec& spec) const;

 private:
  const Launch launch_;
  const RankGroup all_;  // workers
  const int num_servers_;
  const uint32_t smallest_partition_;
  const uint32_t largest_partition_;
  const bool stochastic_;
  const Patience patience_;
  const KeyHash hash_;
  double link_bytes_per_s_ = 0;
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_ENGINE_PLAN_H_
