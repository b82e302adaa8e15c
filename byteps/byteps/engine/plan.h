// Plan: decides how a tensor is cut into partitions, and which server sums each of them, before
// anything is sent.
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

// Description of a tensor, as the caller of push_pull gives it.
struct TensorSpec {
  std::string name;
  DType dtype = DType::kFloat32;
  uint64_t bytes = 0;
  // Bytes of the whole tensor if this is a piece of another one, otherwise 0.
  uint64_t piece_of = 0;
  bool average = true;
  bool in_order = false;                             // see Declaration
  bool feedback = false;                             // for blocks: see Declaration
  RankGroup group;                                   // ranks that sum; empty: all workers
  std::optional<uint64_t> placement;                 // see Declaration; empty: from the key
  int device = kCpu;                                 // device of the memory
  std::shared_ptr<const UpdateRule> rule = nullptr;  // null: servers do not update it
};

// Thread-safe when SetLink was called, because it does not change any more.
class Plan {
 public:
  Plan(const Config& config, const Launch& launch, int num_servers);

  // Sets the bandwidth of the slowest worker's NIC, in Gbit/s per direction; 0 if unknown. All
  // workers pass the same value.
  void SetLink(double gbps) { link_bytes_per_s_ = gbps * 1e9 / 8; }

  int num_servers() const { return num_servers_; }
  const Launch& launch() const { return launch_; }
  // Upper limit of partition bytes, for any tensor.
  uint32_t largest_partition() const { return largest_partition_; }

  // Returns the partition bytes of a tensor of `bytes` bytes. `piece_of`: see TensorSpec. A piece
  // gets partitions as long as those of its whole tensor, because a partition has a fixed cost, and
  // each server gets partitions of all pieces.
  uint32_t PartitionBytes(DType dtype, uint64_t bytes, uint64_t piece_of = 0,
                          bool updated = false) const;

  // Makes the declaration that servers get. Throws UsageError if the tensor cannot be summed.
  Declaration Declare(const TensorSpec& spec) const;

  // Servers of a tensor's partitions, and the order in which this worker pushes them.
  struct Layout {
    int rank = 0;                 // this worker's rank
    std::vector<int> servers;     // the server of each partition
    std::vector<uint32_t> order;  // partitions in the order in which this worker pushes them
  };

  // Lays out a declaration. Each worker starts with another server, so that not all send to the
  // same server at once.
  Layout LayOut(const Declaration& declaration) const;

  std::vector<uint64_t> BytesPerServer(const TensorSpec& spec) const;

 private:
  const Launch launch_;
  const RankGroup all_;  // all workers
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
