// What a worker of a replica does: steps of sums, each of which it checks; and how replicas join.
#ifndef BYTEPS_TESTS_SIMULATION_REPLICA_MEMBER_H_
#define BYTEPS_TESTS_SIMULATION_REPLICA_MEMBER_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "byteps/engine/worker.h"

namespace byteps {
namespace simulation {

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
  bool backups = false;   // and servers have links with each other
  // Servers keep so many parameters for each place as well; 0: none.
  size_t parameters = 0;

  int workers() const { return replicas * ranks; }
};

// No rank's values follow from those of others: sums of different lists differ.
float InputOf(uint64_t rank, uint64_t life, uint64_t step, uint64_t tensor, uint64_t index);

// What the members of all replicas have seen, to be compared.  Threads are played one at a time,
// and none of these calls waits.
class Witness {
 public:
  // The sum of a partition lacked these ranks, as a member found.
  void SawSum(int step, int tensor, int place, size_t partition, uint32_t lacks);
  // This life of a rank pushes the values of a step.
  void Pushes(int rank, int life, int step);
  // Which life of a rank pushed a step; 0: none.
  int LifeAt(int rank, int step) const;
  void Ended(int rank, uint64_t state);
  void Wrong(const std::string& what);
  // Whether a rank has pushed anything.
  bool begun() const { return !lives_.empty(); }

  const std::string& wrong() const { return wrong_; }
  int joins = 0;
  int short_sums = 0;
  int loaded = 0;  // ranks that know that servers have what they begin with
  // What a donor says of its rounds, by its rank; it travels apart from the played network.
  std::map<int, std::map<std::string, uint32_t>> rounds;
  // And of the state of the servers' optimizer.
  std::map<int, std::vector<float>> optimizers;

 private:
  std::map<std::pair<std::pair<int, int>, std::pair<int, size_t>>, uint32_t> lists_;
  std::map<std::pair<int, int>, int> lives_;  // by rank and step
  std::map<int, uint64_t> states_;            // by place
  std::string wrong_;
};

// What the ranks of one life of a replica tell each other, as torch.distributed does.
class Inside {
 public:
  explicit Inside(int ranks) : ranks_(ranks) {}
  // All ranks call this; it returns what place 0 gave.  Throws core::Error once one has gone.
  std::vector<double> Broadcast(int place, const std::vector<double>& values);
  void Break();
  // Ranks that begin something within these seconds stand still for as long.
  void Stick(double seconds);
  void RestIfStuck();

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
  // Of a late one: returns its first step.
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
  // Of this step and the one before, by tensor and partition: what the sum lacks.
  std::map<std::pair<int, size_t>, uint32_t> seen_, seen_before_;
};

}  // namespace simulation
}  // namespace byteps
#endif  // BYTEPS_TESTS_SIMULATION_REPLICA_MEMBER_H_
