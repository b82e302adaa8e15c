// Simulated job: its nodes, their scripts, its faults, its conditions. For several replicas, see
// replica_job.h.
#ifndef BYTEPS_TESTS_SIMULATION_JOB_H_
#define BYTEPS_TESTS_SIMULATION_JOB_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/engine/worker.h"
#include "byteps/server/optimizer/partition_state.h"
#include "byteps/server/sum_server.h"
#include "world.h"

namespace byteps {
namespace simulation {

// A worker's rank in a generation.
struct Part {
  int generation;
  int rank;
  int workers;
  int rounds;
};

class WorkerScript {
 public:
  // `plan` outlives this object. `gpu`: null if the tensors are not on it.
  WorkerScript(const Plan* plan, const Part& part, core::Worker* worker, Gpu* gpu);

  // Throws core::Error if something fails.
  void Run();

  // The violated condition, or "".
  const std::string& wrong() const { return wrong_; }

 private:
  using Values = std::vector<float>;

  void Sums(int round);
  void Burst();
  struct Sum {
    int tensor, round;
    size_t count;
  };
  void Start(const std::vector<Sum>& sums);
  void Release(const std::vector<Sum>& sums);
  void CheckSum(const Values& values, int tensor, int round);
  // Makes a step of the parameters, or does something else with them.
  void Update(int round);
  void Load();
  int64_t Ask(int op, const core::PushPullRequest& like, const std::string& detail);
  core::PushPullRequest Parameters() const;
  core::UpdateStep StepOf(int round, double scale) const;
  // Computes the parameters that servers must have after these gradients.
  void Expect(const core::UpdateStep& step, int round);
  void CheckParameters(const Values& values, int round, const char* what);
  // Returns false if the operation failed, and keeps the error.
  bool Await(int64_t handle);
  // Handles a failed operation. Either the worker continues, or this throws.
  void AfterFailure();

  const Plan& plan_;
  const Part part_;
  core::Worker* const worker_;
  Gpu* const gpu_;
  std::string wrong_;
  std::string error_;  // error of the last failed operation
  // Memory of tensors; transports may read it until the worker stops.
  std::deque<Values> memory_;
  std::deque<std::vector<core::GradientSums>> sums_;

  // Whether this worker's rounds match those of the other workers. False when an operation could
  // not begin.
  bool in_step_ = true;

  // State of the parameters:
  bool surely_ = true;  // nothing has failed yet, so their values are known
  uint64_t steps_ = 0;
  core::Verdict verdict_ = core::Verdict::kNone;  // on the last speculative step
  core::Declaration whole_;  // the parameters in one partition, to compute the expected values
  std::unique_ptr<core::PartitionState> expected_;
};

// ----- a simulated job: its nodes, its launcher, its faults, its conditions

// Events of a server or the scheduler, while it serves.
class ServingNode : public core::ChannelUser {
 public:
  using Hear = std::function<void(const ps::MembershipEvent&)>;

  // `server`: null on the scheduler, which tells `hear` of each event.
  explicit ServingNode(core::SumServer* server, Hear hear = nullptr)
      : server_(server), hear_(std::move(hear)) {}
  void OnMessage(core::Message* message) override;
  void OnEvent(const ps::MembershipEvent& event) override;
  // Ends the wait. `by_order`: whether a signal has told the node to stop.
  void End(bool by_order);
  // Returns why the job failed, or "".
  std::string AwaitEnd(bool* by_order);

 private:
  void TellServer(const ps::MembershipEvent& event);

  core::SumServer* const server_;
  const Hear hear_;
  std::mutex mu_;
  std::condition_variable cond_;
  bool ended_ = false;
  bool by_order_ = false;
  std::string failure_;
};

// Returns whether a node ended because servers have lost optimizer state.
bool IsOfLostState(const std::string& error);

constexpr int kMaxGenerations = 10;

class Job {
 public:
  // `breaks_invariant`: breaks an invariant somewhere in the job.
  Job(Plan plan, bool breaks_invariant);
  ~Job();

  void Run();
  // The violated condition, or "".
  std::string Verdict() const;
  std::string Describe() const;
  bool failed() const;
  int generations() const { return generations_; }
  bool ended_well() const { return ended_well_; }
  int replaced() const { return spares_.served; }

 private:
  // A node's worker, which another thread may stop, too.
  struct WorkerOfNode {
    core::Worker worker;
    std::mutex mu;            // held while it is started or stopped
    bool is_stopped = false;  // by another thread: later errors of its own thread are no failures

    void Stop() {
      std::lock_guard<std::mutex> lock(mu);
      worker.Stop(false);
    }
  };

  // Node of a generation, with its error. A server or scheduler may live through many generations.
  struct NodeRecord {
    ps::Node::Role role;
    int rank = 0;
    bool done = false;
    std::string error;                     // "" if it ended well
    std::shared_ptr<WorkerOfNode> worker;  // while it runs one
  };

  NodeSettings SettingsOf(ps::Node::Role role, int number, int rank, int workers) const;
  // Starts a node with the next number, in this role and rank.
  void Start(std::vector<std::thread>* threads, ps::Node::Role role, int rank, int workers,
             int generation);
  bool IsGone(int place) const;
  void RunNode(ps::Node::Role role, int number);
  // Returns why the job failed, or "". Sets `again` to true if the node can serve another job: it
  // has joined one, and nothing has told it to stop.
  std::string ServeOnce(const NodeSettings& settings, bool* again);
  void RunWorker(int number, int rank, int workers, int generation);
  uint64_t WantedSums() const;

  // Causes the faults that are due at a time.
  void BreakInTime();
  // Causes the faults that are due after a number of probes. OnProbe is called with that number,
  // and a thread of its own causes them.
  void OnProbe(int probe, int reached);
  void BreakAtProbes();
  // Causes the faults that are due at a wait, while it lasts.
  Waking OnWait(const Wait& wait, const Fault& fault);
  void Break(const Fault& fault);
  // Returns the number of the node that a fault names; negative if its rank has no node, and had
  // none.
  int FindNode(const Fault& fault, int node) const;
  // Returns whether the fault kills the scheduler, which then restarts.
  bool Returns(const Fault& fault) const {
    return plan_.returns && fault.kind == Fault::kKill && fault.node == 0;
  }
  // Starts a spare server, because a server may be lost.
  void StartSpare();
  // Returns whether the job must succeed with backups, whatever the faults.
  bool MustGoOn() const;
  // Returns whether the job, with backups, has reported that state was lost.
  bool LostState() const;
  // Returns whether no fault is permanent.
  bool IsHarmless() const;
  // Kills the scheduler's process, and starts another one.
  void BreakScheduler();

  // Returns whether a node may report any error, because a fault has cut it off or killed it.
  bool IsVictim(int node) const { return victims_.count(node) > 0; }
  bool NamesACause(const std::string& error) const;
  std::string NameOf(size_t node) const;

  const Plan plan_;
  const bool breaks_invariant_;
  const core::Config& config_;
  Network network_;
  std::unique_ptr<Gpu> gpu_;
  std::vector<std::unique_ptr<NodeRecord>> records_;   // by number
  std::map<int, int> at_place_;                        // numbers, by rank
  std::map<int, std::shared_ptr<ServingNode>> users_;  // by number, while they serve
  std::set<int> broken_;                               // involved in a fault
  std::set<int> victims_;                              // killed, paused or stopped
  std::set<int> killed_;
  bool ended_scheduler_ = false;  // by a fault
  int started_ = 0;               // workers and servers that have joined
  bool dies_ = false;             // a killed scheduler is about to restart
  bool returned_ = false;
  int generations_ = 0;
  bool ended_well_ = false;  // the workers of the last generation
  uint64_t sums_ = 0;        // made by servers
  // With backups: spare servers.
  struct Spares {
    std::vector<std::thread> threads;
    std::set<int> numbers;
    int served = 0;
    bool too_early = false;  // a fault happened before all had joined
  };
  Spares spares_;
  std::string wrong_;

  std::vector<Fault> at_probes_;  // not due yet
  std::vector<Fault> due_;        // due now
  bool over_ = false;
  std::mutex due_mu_;
  std::condition_variable due_cond_;
};

}  // namespace simulation
}  // namespace byteps

#endif  // BYTEPS_TESTS_SIMULATION_JOB_H_
