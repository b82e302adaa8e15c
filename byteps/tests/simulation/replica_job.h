// One job of several replicas that is played: its members, what they do, what breaks in it, and
// what must hold.
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

// ----- What a worker of a replica does: steps of sums, each of which it checks; and how replicas
// join.

// The job that is played.
struct ReplicaPlan {
  int replicas = 2;
  int ranks = 1;  // of each
  int servers = 1;
  int steps = 1;
  std::vector<size_t> counts;  // values of each tensor
  size_t settings = 0;         // index into Settings()
  bool disturbed = false;
  bool patient = false;   // those that are late are removed after kGraceS
  bool returns = false;   // the scheduler, when it was killed
  bool replaces = false;  // a server that is lost may be replaced
  bool backups = false;   // and servers have copies of each other's state
  // Servers keep so many parameters for each place as well; 0: none.
  size_t parameters = 0;

  int workers() const { return replicas * ranks; }
};

// Sums that the members of all replicas have seen, to be compared.  Threads are played one at a
// time, and none of these calls waits.
class Witness {
 public:
  // The sum of a partition lacked these ranks, as a member found.
  void SawSum(int step, int tensor, int place, size_t partition, uint32_t lacks);
  // This life of a rank pushes the values of a step.
  void Pushes(int rank, int life, int step);
  // The life of a rank that pushed a step; 0: none.
  int LifeAt(int rank, int step) const;
  void Ended(int rank, uint64_t state);
  void Wrong(const std::string& what);
  // Whether a rank has pushed anything.
  bool begun() const { return !lives_.empty(); }

  const std::string& wrong() const { return wrong_; }
  int joins = 0;
  int short_sums = 0;
  int loaded = 0;  // ranks that know that servers have what they begin with
  // Rounds that a donor names, by its rank; it travels apart from the played network.
  std::map<int, core::ProgressByTensor> rounds;
  // And of the state of the servers' optimizer.
  std::map<int, std::vector<float>> optimizers;

 private:
  std::map<std::pair<std::pair<int, int>, std::pair<int, size_t>>, uint32_t> lists_;
  std::map<std::pair<int, int>, int> lives_;  // by rank and step
  std::map<int, uint64_t> states_;            // by place
  std::string wrong_;
};

// Messages among the ranks of one life of a replica, as torch.distributed carries them.
class Inside {
 public:
  explicit Inside(int ranks) : ranks_(ranks) {}
  // All ranks call this; it returns what place 0 gave.  Throws core::Error once one has gone.
  std::vector<double> Broadcast(int place, const std::vector<double>& values);
  void Break() {
    std::lock_guard<std::mutex> lock(mu_);
    broken_ = true;
    cond_.notify_all();
  }
  // Ranks that begin something within these seconds stand still for as long.
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
  // `life`: of this rank, from 1.
  ReplicaMember(const ReplicaPlan* plan, int rank, int life, core::Worker* worker, Inside* inside,
                Witness* witness);
  ~ReplicaMember();

  // Throws core::Error when its replica is lost.
  void Run();
  // A digest of all sums.
  uint64_t state() const { return state_; }

 private:
  using Values = std::vector<double>;

  // Replica 0 gives servers the parameters before anybody makes a step.
  void BeginOptimizer();
  void Step(int step);
  void CheckSum(const std::vector<float>& values, int step, int tensor, uint32_t named,
                uint32_t* lacks);
  // Between two steps: whether a replica joins; if one does, the next step is its first.
  void Control(int step);
  void Admit(int step, int replica, int life);
  void Send(int step, int joiner, int life);
  // Returns the first step of a late rank.
  int Join();
  void CompareStates();
  // All members of this place sum it; or those two.
  void Sum(const std::string& name, Values* values, std::vector<uint32_t> group = {});
  std::vector<uint32_t> Peers() const;
  // Waits until the scheduler has told something.
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
  std::unique_ptr<ReplicaOptimizer> optimizer_;  // null: there is none
  uint64_t state_ = 1;                           // a digest of all sums so far
  std::deque<std::vector<float>> memory_;        // that transports may read until the worker stops
  std::deque<Values> small_;
  // Ranks that the sum lacks, by tensor and partition, of this step and the one before.
  std::map<std::pair<int, size_t>, uint32_t> seen_, seen_before_;
};

// ----- Parameters that servers keep for replicas, as one rank of one of them updates and checks
// them.

// Demanded: after each step the parameters are those of the steps that the lists make which answers
// name, to the bit; and of one that joins, those that its donor has.
class ReplicaOptimizer {
 public:
  // No tensor of the sums has this number.
  static constexpr int kTensor = 7;
  using Values = std::vector<float>;
  // By tensor and partition: the replicas that what was answered lacks, a bit each.
  using Lists = std::map<std::pair<int, size_t>, uint32_t>;

  // `worker`: has started.
  ReplicaOptimizer(const ReplicaPlan* plan, int rank, core::Worker* worker, Witness* witness);

  // Gives servers the parameters that all begin with; replica 0 calls it.
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
  // The servers' state as this rank knows it, slot by slot, partition by partition.
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

// ----- One job of several replicas that is played: some die or stand still, and come back; in half
// of the jobs so do servers, and others take their places.

// Demanded: members get the same sum of each partition, which is the closed form of the list that
// its answer names; nobody's push is counted in two lives; replicas end with the same state; the
// replica that nothing happens to, the servers and the scheduler end well, and so does each that
// joins in time and is left alone.
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
    std::vector<std::string> errors;  // by place; empty: well
    std::vector<int> nodes;
    Inside* inside = nullptr;  // while its ranks run
    int running = 0;
  };
  class KeptNode;

  void MakePlan();
  NodeSettings SettingsOf(ps::Node::Role role, int number, int rank) const;
  const core::Config& settings() const;
  // A scheduler, a server, or one that waits for a place.
  struct Kept {
    ps::Node::Role role = ps::Node::SERVER;
    bool is_spare = false;
    bool is_broken = false;
    bool served = false;
    std::string error;  // that it ended with
  };
  void Serve(int number);
  void RunScheduler();
  // Runs the lives of a replica, one after the other.
  void RunReplica(int replica);
  void RunMember(Life* life, int place, Inside* inside);
  void OnProbe(int probe, int reached);
  void BreakThings();
  void Break(const Fault& fault);
  void BreakServer(const Fault& fault);
  void StartSpare();
  // Its process dies, and another one takes its place.
  void BreakScheduler();
  // Whether a server and its backup may have been lost.
  bool MayLoseState() const;

  ReplicaPlan plan_;
  std::vector<Fault> faults_;  // their node is a worker's rank, or below 0: a server, or kScheduler
  int most_lives_ = 1;
  Network network_;
  Witness witness_;
  std::vector<std::unique_ptr<Life>> lives_;
  std::map<int, Life*> now_;  // by replica
  std::map<int, Kept> kept_;  // by number
  std::set<int> serving_;     // numbers of servers that have a place, or had it when they died
  std::vector<std::thread> spares_;
  int next_node_ = 0;
  std::shared_ptr<KeptNode> scheduler_;  // while it serves
  bool dies_ = false;                    // it, and it returns
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
