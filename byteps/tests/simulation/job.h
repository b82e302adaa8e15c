// One job that is played: its nodes, what they do, what breaks in it, and what must hold.  Of
// several replicas: replica_job.h.
#ifndef BYTEPS_TESTS_SIMULATION_JOB_H_
#define BYTEPS_TESTS_SIMULATION_JOB_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "byteps/engine/worker.h"
#include "byteps/server/optimizer/partition_state.h"
#include "byteps/server/sum_server.h"
#include "world.h"

namespace byteps {
namespace simulation {

// Of a worker of one generation.
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

  // Throws core::Error when something fails.
  void Run();

  // What was wrong; empty if nothing was.
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
  // An operation failed: the worker goes on, or throws.
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

// ----- One job that is played: its nodes, its launcher, what breaks in it, and what must hold.

// Whether a node ended since servers have lost an optimizer's state.
bool IsOfLostState(const std::string& error);

constexpr int kMaxIncarnations = 10;

class Job {
 public:
  // `breaks_invariant`: one is broken on purpose, somewhere in the job.
  Job(Plan plan, bool breaks_invariant);
  ~Job();

  void Run();
  // Why it is wrong; empty if all is well.
  std::string Verdict() const;
  std::string Describe() const;
  bool failed() const;
  int incarnations() const { return incarnations_; }
  bool ended_well() const { return ended_well_; }
  int replaced() const { return spares_.served; }

 private:
  // The worker of a node, which another thread may stop, too.
  struct WorkerOfNode {
    core::Worker worker;
    std::mutex mu;            // held by who starts or stops it
    bool is_stopped = false;  // by another thread: what its own one is told then is no failure

    void Stop() {
      std::lock_guard<std::mutex> lock(mu);
      worker.Stop(false);
    }
  };

  // A node of one generation, and what it ended with.  A server or scheduler may live through
  // many.
  struct NodeRecord {
    ps::Node::Role role;
    int rank = 0;
    bool done = false;
    std::string error;                     // empty: well
    std::shared_ptr<WorkerOfNode> worker;  // while it runs one
  };

  // What a server or the scheduler hears.
  class NodeUser : public core::ChannelUser {
   public:
    explicit NodeUser(core::SumServer* server) : server_(server) {}
    void OnMessage(core::Message* message) override;
    void OnEvent(const ps::MembershipEvent& event) override;
    // It need not wait any longer; or it is told to end by a signal.
    void End(bool by_order);
    // Why the job failed; empty if it did not.
    std::string AwaitEnd(bool* by_order);

   private:
    core::SumServer* const server_;
    std::mutex mu_;
    std::condition_variable cond_;
    bool ended_ = false;
    bool by_order_ = false;
    std::string failure_;
  };

  NodeSettings SettingsOf(ps::Node::Role role, int number, int rank, int workers) const;
  // Starts a node, under the next number, at its place of the job.
  void Start(std::vector<std::thread>* threads, ps::Node::Role role, int rank, int workers,
             int incarnation);
  bool IsGone(int place) const;
  void RunNode(ps::Node::Role role, int number);
  // Why the job failed; empty if it did not.  `again`: it did once the node was in it.
  std::string ServeOnce(const NodeSettings& settings, bool* again);
  void RunWorker(int number, int rank, int workers, int incarnation);
  uint64_t WantedSums() const;

  // Breaks what breaks at some time.
  void BreakInTime();
  // And what breaks when so many probes were reached; called with that number, then a thread.
  void OnProbe(int probe, int reached);
  void BreakAtProbes();
  // And at a wait, while it lasts.
  Waking OnWait(const Wait& wait, const Fault& fault);
  void Break(const Fault& fault);
  // Number of a node that a fault names; below 0: nobody has, or has had, its place.
  int FindNode(const Fault& fault, int node) const;
  // Of the scheduler, which returns.
  bool Returns(const Fault& fault) const {
    return plan_.returns && fault.kind == Fault::kKill && fault.node == 0;
  }
  // Another server is started, since one may be lost.
  void StartSpare();
  // With backups: whether the job has to end well.
  bool MustGoOn() const;
  // And whether it says that a state is lost.
  bool LostState() const;
  // Whether nothing breaks for good.
  bool IsHarmless() const;
  // Its process dies, and another one takes its place.
  void BreakScheduler();

  // It may say what it likes: the others seem to be gone.
  bool IsVictim(int node) const { return victims_.count(node) > 0; }
  bool NamesACause(const std::string& error) const;
  std::string NameOf(size_t node) const;

  const Plan plan_;
  const bool breaks_invariant_;
  const core::Config& config_;
  Network network_;
  std::unique_ptr<Gpu> gpu_;
  std::vector<std::unique_ptr<NodeRecord>> records_;  // by number
  std::map<int, int> at_place_;                       // numbers
  std::map<int, std::shared_ptr<NodeUser>> users_;    // by number, while they serve
  std::set<int> broken_;                              // that a fault has had to do with
  std::set<int> victims_;                             // that were killed, paused or stopped
  std::set<int> killed_;
  bool ended_scheduler_ = false;  // by a fault
  int started_ = 0;               // workers and servers that have joined
  bool dies_ = false;             // the scheduler, which returns
  bool returned_ = false;
  int incarnations_ = 0;
  bool ended_well_ = false;  // the workers of the last generation
  uint64_t sums_ = 0;        // that servers made
  // With backups: servers that wait for the place of one that is lost.
  struct Spares {
    std::vector<std::thread> threads;
    std::set<int> numbers;
    int served = 0;
    bool too_early = false;  // something broke before all had come
  };
  Spares spares_;
  std::string wrong_;

  std::vector<Fault> at_probes_;  // that have not happened
  std::vector<Fault> due_;        // that are to happen now
  bool over_ = false;
  std::mutex due_mu_;
  std::condition_variable due_cond_;
};

}  // namespace simulation
}  // namespace byteps

#endif  // BYTEPS_TESTS_SIMULATION_JOB_H_
