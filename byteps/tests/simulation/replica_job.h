// Simulated job with several replicas: its members, their scripts, its faults, its conditions.
#ifndef BYTEPS_TESTS_SIMULATION_REPLICA_JOB_H_
#define BYTEPS_TESTS_SIMULATION_REPLICA_JOB_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
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
#include "job.h"
#include "world.h"

namespace byteps {
namespace simulation {

// ----- a worker of a replica: steps of sums, which it checks; replicas that join

// Plan of a simulated job.
struct ReplicaPlan {
  int replicas = 2;
  int ranks = 1;  // per replica
  int servers = 1;
  int steps = 1;
  std::vector<size_t> counts;  // values per tensor
  size_t settings = 0;         // index into Settings()
  bool disturbed = false;
  bool patient = false;   // late replicas are removed after kGraceS
  bool returns = false;   // a killed scheduler restarts
  bool replaces = false;  // lost servers may be replaced
  bool backups = false;   // servers have copies of each other's state
  // Number of parameters that servers keep for each rank of a replica; 0: none.
  size_t parameters = 0;

  int workers() const { return replicas * ranks; }
};

// Sums that members of all replicas have seen, for comparison. Simulated threads run one at a time,
// and none of these calls waits.
class Witness {
 public:
  // Records that a member got a sum of a partition without these ranks.
  void SawSum(int step, int tensor, int place, size_t partition, uint32_t lacks);
  // Records that a rank pushes the values of a step. `life`: number of the rank's process, from 1;
  // a restarted rank has the next number.
  void Pushes(int rank, int life, int step);
  // Returns the number of the process in which a rank has pushed a step; 0 if it has not pushed the
  // step.
  int LifeAt(int rank, int step) const;
  void Ended(int rank, uint64_t state);
  void Wrong(const std::string& what);
  // Returns whether any rank has pushed.
  bool begun() const { return !lives_.empty(); }

  const std::string& wrong() const { return wrong_; }
  int joins = 0;
  int short_sums = 0;
  int loaded = 0;  // ranks that know that servers have the initial state
  // Progress that a donor gives to a joining replica, by rank, outside of the simulated network.
  std::map<int, core::ProgressByTensor> rounds;
  // Optimizer state that a donor gives.
  std::map<int, std::vector<float>> optimizers;

 private:
  std::map<std::pair<std::pair<int, int>, std::pair<int, size_t>>, uint32_t> lists_;
  std::map<std::pair<int, int>, int> lives_;  // by rank and step
  std::map<int, uint64_t> states_;            // by place
  std::string wrong_;
};

// Messages among the ranks of a replica until its restart, in place of torch.distributed.
class Inside {
 public:
  explicit Inside(int ranks) : ranks_(ranks) {}
  // Returns local rank 0's values on every rank. All ranks call this. Throws core::Error if a rank
  // has ended.
  std::vector<double> Broadcast(int place, const std::vector<double>& values);
  void Break() {
    std::lock_guard<std::mutex> lock(mu_);
    broken_ = true;
    cond_.notify_all();
  }
  // Makes ranks that begin a call within these seconds sleep until the seconds are over.
  void Stick(double seconds) {
    std::lock_guard<std::mutex> lock(mu_);
    stuck_until_ = std::chrono::steady_clock::now() + Duration(seconds);
  }
  void RestIfStuck() {
    std::unique_lock<std::mutex> lock(mu_);
    const auto rest = stuck_until_ - std::chrono::steady_clock::now();
    lock.unlock();
    if (rest > rest.zero()) std::this_thread::sleep_for(rest);
  }

 private:
  const int ranks_;
  std::chrono::steady_clock::time_point stuck_until_;
  std::mutex mu_;
  std::condition_variable cond_;
  int came_ = 0;
  uint64_t turn_ = 0;
  bool broken_ = false;
  std::vector<double> given_, values_;
};

class ReplicaOptimizer;

class ReplicaMember {
 public:
  // `life`: number of this rank's process, from 1.
  ReplicaMember(const ReplicaPlan* plan, int rank, int life, core::Worker* worker, Inside* inside,
                Witness* witness);
  ~ReplicaMember();

  // Throws core::Error if its replica is lost.
  void Run();
  // Returns a digest of all sums.
  uint64_t state() const { return state_; }

 private:
  using Values = std::vector<double>;

  // Loads the parameters before any step. Called by replica 0.
  void BeginOptimizer();
  void Step(int step);
  void CheckSum(const std::vector<float>& values, int step, int tensor, uint32_t named,
                uint32_t* lacks);
  // Lets a waiting replica join. The next step is its first. Call between two steps.
  void Control(int step);
  void Admit(int step, int replica, int life);
  void Send(int step, int joiner, int life);
  // Returns the first step of a late rank.
  int Join();
  void CompareStates();
  // Sums over the workers with this local rank in all replicas, or over `group`.
  void Sum(const std::string& name, Values* values, std::vector<uint32_t> group = {});
  std::vector<uint32_t> Peers() const;
  // Waits for a report of the scheduler that fulfils the condition.
  template <typename Condition>
  ps::ReplicaView Await(Condition condition);

  const ReplicaPlan& plan_;
  const int rank_;
  const int life_;
  const int replica_;
  const int place_;  // within the replica
  core::Worker* const worker_;
  Inside* const inside_;
  Witness* const witness_;
  std::unique_ptr<ReplicaOptimizer> optimizer_;  // null: none
  uint64_t state_ = 1;                           // digest of all sums so far
  std::deque<std::vector<float>> memory_;        // transports may read it until the worker stops
  std::deque<Values> small_;
  // Ranks missing in sums, by tensor and partition, in this step and the previous one.
  std::map<std::pair<int, size_t>, uint32_t> seen_, seen_before_;
};

// ----- parameters that servers keep for replicas, as a rank updates and checks them

// Conditions: after each step the parameters equal, bit by bit, those of the pushes that answers
// name; a joining member has those of its donor.
class ReplicaOptimizer {
 public:
  // A number that no summed tensor has.
  static constexpr int kTensor = 7;
  using Values = std::vector<float>;
  // Replicas missing in each answer, as bits, by tensor and partition.
  using Lists = std::map<std::pair<int, size_t>, uint32_t>;

  // Requires a started `worker`.
  ReplicaOptimizer(const ReplicaPlan* plan, int rank, core::Worker* worker, Witness* witness);

  // Loads the initial parameters; called by replica 0.
  void Load();
  // Makes a step in a random way. Throws core::Error.
  void Step(int step, int life);
  // Finds the replicas whose gradients are in the step. `named`: replicas that answers called
  // missing. Returns the replicas that any partition lacks.
  uint32_t Check(int step, uint32_t named, Lists* lists);
  // Returns a hash of all parameters.
  uint64_t Digest() const;

  // Sends servers the verdict on the last step. Call between two steps.
  void Settle();
  // The servers' state as this rank computes it, by slot, and each slot by partition.
  Values State() const;
  // Reads the parameters from the servers, and compares them with the state of the donor.
  void Join(const Values& donors);

 private:
  core::PushPullRequest Request() const;
  void Await(int op, core::PushPullRequest request, const std::string& detail);
  core::UpdateStep StepOf(int step, double scale) const;
  std::string TakeVerdict();
  void Read(uint64_t end, Values* values, const std::string& verdict);
  // Sums the gradients of a partition, except those of the replicas `without`. Returns false if not
  // all other replicas have pushed it.
  bool SumOf(int step, size_t partition, uint32_t without, Values* sum) const;

  const ReplicaPlan& plan_;
  const int rank_;
  core::Worker* const worker_;
  Witness* const witness_;
  core::Declaration whole_;
  std::vector<std::unique_ptr<core::PartitionState>> expected_;  // by partition
  std::deque<Values> memory_;  // transports may read it until the worker stops
  std::vector<core::GradientSums> sums_;
  Values parameters_;       // the answer of the last step
  core::UpdateStep asked_;  // the last step
  bool drops_ = false;      // the last step was speculative and is dropped
  core::Verdict verdict_ = core::Verdict::kNone;
  uint64_t steps_ = 0;
};

// ----- a simulated job with several replicas: some die or hang, and come back; in half of the jobs
// servers do so as well, and are replaced

// Conditions: members get the same sum of each partition, in closed form of the members that
// answers name; no push of a process counts after its restart; all replicas end with the same
// state; the spared replica, the servers and the scheduler end well, as does every replica that
// joins in time and is hit by no fault.
class ReplicaJob {
 public:
  ReplicaJob();
  ~ReplicaJob();

  void Run();
  std::string Verdict() const;
  std::string Describe() const;
  int joins() const { return witness_.joins; }
  int short_sums() const { return witness_.short_sums; }
  int removed() const { return removed_; }
  int replaced() const { return replaced_; }
  int returns() const { return returns_; }

 private:
  struct Life {
    int replica = 0;
    int number = 0;  // from 1
    bool is_broken = false;
    std::vector<std::string> errors;  // by place; "" if it ended well
    std::vector<int> nodes;
    Inside* inside = nullptr;  // while its ranks run
    int running = 0;
  };

  void MakePlan();
  NodeSettings SettingsOf(ps::Node::Role role, int number, int rank) const;
  const core::Config& settings() const;
  // A scheduler, a server, or a spare server.
  struct Kept {
    ps::Node::Role role = ps::Node::SERVER;
    bool is_spare = false;
    bool is_broken = false;
    bool served = false;
    std::string error;  // at its end
  };
  // Counts removed replicas and replaced servers, as the scheduler reports them.
  void Count(const ps::MembershipEvent& event);
  void Serve(int number);
  void RunScheduler();
  // Runs a replica, and restarts it after each end.
  void RunReplica(int replica);
  void RunMember(Life* life, int place, Inside* inside);
  void OnProbe(int probe, int reached);
  void BreakThings();
  void Break(const Fault& fault);
  void BreakServer(const Fault& fault);
  void StartSpare();
  // Kills the scheduler's process, and starts another one.
  void BreakScheduler();
  // Returns whether a server and its backup may both have been lost.
  bool MayLoseState() const;

  ReplicaPlan plan_;
  std::vector<Fault> faults_;  // node: a worker's rank, or negative: a server, or kScheduler
  int most_lives_ = 1;
  Network network_;
  Witness witness_;
  std::vector<std::unique_ptr<Life>> lives_;
  std::map<int, Life*> now_;  // by replica
  std::map<int, Kept> kept_;  // by number
  std::set<int> serving_;     // numbers of servers that have a rank, or had one when they died
  std::vector<std::thread> spares_;
  int next_node_ = 0;
  std::shared_ptr<ServingNode> scheduler_;  // while it serves
  bool dies_ = false;                       // a killed scheduler is about to restart
  int returns_ = 0;
  int started_ = 0;  // servers and workers that have joined
  int removed_ = 0;
  int replaced_ = 0;
  int broken_servers_ = 0;
  bool over_ = false;
  std::vector<Fault> due_;
  std::mutex mu_;
  std::condition_variable cond_;
};

}  // namespace simulation
}  // namespace byteps

#endif  // BYTEPS_TESTS_SIMULATION_REPLICA_JOB_H_
