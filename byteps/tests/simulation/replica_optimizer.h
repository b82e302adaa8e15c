// Parameters that servers keep for replicas, as one rank of one of them updates and checks them.
#ifndef BYTEPS_TESTS_SIMULATION_REPLICA_OPTIMIZER_H_
#define BYTEPS_TESTS_SIMULATION_REPLICA_OPTIMIZER_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "byteps/engine/worker.h"
#include "byteps/server/optimizer/partition_state.h"
#include "replica_member.h"

namespace byteps {
namespace simulation {

// Demanded: after each step the parameters are those of the steps that the lists make which answers
// name, to the bit; and of one that joins, those that its donor has.
class ReplicaOptimizer {
 public:
  // Of the sums' tensors no one has this number.
  static constexpr int kTensor = 7;
  using Values = std::vector<float>;
  // By tensor and partition: the replicas that what was answered lacks, a bit each.
  using Lists = std::map<std::pair<int, size_t>, uint32_t>;

  // Of a worker that has started.
  ReplicaOptimizer(const ReplicaPlan* plan, int rank, core::Worker* worker, Witness* witness);

  // Of replica 0: servers have the parameters that all begin with when this returns.
  void Load();
  // Makes a step by one of the ways that there are.  Throws core::Error.
  void Step(int step, int life);
  // Finds of which replicas the step was made, of those that answers have named: `named` may be
  // lacked.  Returns what any partition lacks.
  uint32_t Check(int step, uint32_t named, Lists* lists);
  // Changes with any parameter.
  uint64_t Digest() const;

  // Between two steps: servers know what becomes of the last one.
  void Settle();
  // What this rank knows of the servers' state, slot by slot, partition by partition.
  Values State() const;
  // Takes the parameters from the servers.  `donors` state is what they must have.
  void Join(const Values& donors);

 private:
  core::PushPullRequest Request() const;
  void Await(int op, core::PushPullRequest request, const std::string& detail);
  core::UpdateStep StepOf(int step, double scale) const;
  std::string TakeVerdict();
  void Read(uint64_t end, Values* values, const std::string& verdict);
  // The gradients of a partition's sum that lacks these; false: not all others have pushed it.
  bool SumOf(int step, size_t partition, uint32_t without, Values* sum) const;

  const ReplicaPlan& plan_;
  const int rank_;
  core::Worker* const worker_;
  Witness* const witness_;
  core::Declaration whole_;
  std::vector<std::unique_ptr<core::PartitionState>> expected_;  // by partition
  std::deque<Values> memory_;  // that transports may read until the worker stops
  std::vector<core::GradientSums> sums_;
  Values parameters_;       // as the last step was answered
  core::UpdateStep asked_;  // which that was
  bool drops_ = false;      // it was tried, and is none
  core::Verdict verdict_ = core::Verdict::kNone;
  uint64_t steps_ = 0;
};

}  // namespace simulation
}  // namespace byteps
#endif  // BYTEPS_TESTS_SIMULATION_REPLICA_OPTIMIZER_H_
