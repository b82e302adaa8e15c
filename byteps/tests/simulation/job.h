// One job that is played: its nodes, its launcher, what breaks in it, and what must hold.
#ifndef BYTEPS_TESTS_SIMULATION_JOB_H_
#define BYTEPS_TESTS_SIMULATION_JOB_H_

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "byteps/server/sum_server.h"
#include "device.h"
#include "plan.h"
#include "simulated_channel.h"

namespace byteps {
namespace simulation {

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
  // A node of one incarnation, and what it ended with.  A server or scheduler may live through
  // many.
  struct NodeRecord {
    ps::Node::Role role;
    int rank = 0;
    bool done = false;
    std::string error;  // empty: well
  };

  // What a server or the scheduler hears.
  class NodeUser : public core::ChannelUser {
   public:
    explicit NodeUser(core::Server* server) : server_(server) {}
    void OnMessage(core::Message* message) override;
    void OnEvent(const ps::MembershipEvent& event) override;
    // It need not wait any longer; or it is told to end by a signal.
    void End(bool by_order);
    // Why the job failed; empty if it did not.
    std::string AwaitEnd(bool* by_order);

   private:
    core::Server* const server_;
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
  void Break(const Fault& fault);
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
  bool ended_well_ = false;  // the workers of the last incarnation
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
