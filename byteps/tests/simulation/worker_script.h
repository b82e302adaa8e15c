// What a worker does: sums, and steps of an optimizer on the servers, each of which it checks.
#ifndef BYTEPS_TESTS_SIMULATION_WORKER_SCRIPT_H_
#define BYTEPS_TESTS_SIMULATION_WORKER_SCRIPT_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "byteps/engine/worker.h"
#include "byteps/server/optimizer/partition_state.h"
#include "device.h"
#include "plan.h"

namespace byteps {
namespace simulation {

// Of a worker of one incarnation.
struct Part {
  int incarnation;
  int rank;
  int workers;
  int rounds;
};

class WorkerScript {
 public:
  // `plan` outlives this.  `gpu`: null, if its tensors are not on it.
  WorkerScript(const Plan* plan, const Part& part, core::Worker* worker, Gpu* gpu);

  // Throws core::Error, with the worker stopped, when something fails.
  void Run();

  // What was wrong; empty if nothing was.
  const std::string& wrong() const { return wrong_; }

 private:
  using Values = std::vector<float>;

  void Sums(int round);
  void CheckSum(const Values& values, int tensor, int round);
  // A step of the parameters, or what else is done with them.
  void Update(int round);
  void Load();
  int64_t Ask(int op, const core::PushPullRequest& like, const std::string& detail);
  core::PushPullRequest Parameters() const;
  core::UpdateStep StepOf(int round, double scale) const;
  // What the servers' parameters are after these gradients.
  void Expect(const core::UpdateStep& step, int round);
  void CheckParameters(const Values& values, int round, const char* what);
  // False: it failed.  Why is kept.
  bool Await(int64_t handle);
  // An operation failed: the worker goes on or, with all its memory unread, throws.
  void AfterFailure();

  const Plan& plan_;
  const Part part_;
  core::Worker* const worker_;
  Gpu* const gpu_;
  std::string wrong_;
  std::string error_;  // of the operation that failed last
  // Of tensors; transports may read it until the worker stops.
  std::deque<Values> memory_;
  std::deque<std::vector<core::GradientSums>> sums_;

  // Its rounds are those of the others.  Not so once an operation could not even be begun.
  bool in_step_ = true;

  // Of the parameters:
  bool surely_ = true;  // nothing has failed yet, so that their values are known
  uint64_t steps_ = 0;
  core::Verdict verdict_ = core::Verdict::kNone;  // of the step that was tried last
  core::Declaration whole_;                       // of one partition, to know what to expect
  std::unique_ptr<core::PartitionState> expected_;
};

}  // namespace simulation
}  // namespace byteps
#endif  // BYTEPS_TESTS_SIMULATION_WORKER_SCRIPT_H_
