// One job of several replicas that is played: some die or stand still, and come back; in half of
// the jobs so do servers, and others take their places.
#ifndef BYTEPS_TESTS_SIMULATION_REPLICA_JOB_H_
#define BYTEPS_TESTS_SIMULATION_REPLICA_JOB_H_

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "plan.h"
#include "replica_member.h"
#include "simulated_channel.h"

namespace byteps {
namespace simulation {

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
  bool over_ = false;
  std::vector<Fault> due_;
  std::mutex mu_;
  std::condition_variable cond_;
};

}  // namespace simulation
}  // namespace byteps
#endif  // BYTEPS_TESTS_SIMULATION_REPLICA_JOB_H_
