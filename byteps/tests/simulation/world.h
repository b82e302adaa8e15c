// The simulation of jobs: threads and time, a seed's plan for a job, the network between nodes, the
// nodes, and a GPU.
#ifndef BYTEPS_TESTS_SIMULATION_WORLD_H_
#define BYTEPS_TESTS_SIMULATION_WORLD_H_

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/base/invariant.h"
#include "byteps/cluster/channel.h"
#include "byteps/cluster/early_messages.h"
#include "byteps/cluster/ps_message.h"
#include "byteps/device/device.h"
#include "byteps/net/membership/node_membership.h"
#include "ps/internal/message.h"

namespace byteps {
namespace simulation {

// ----- simulated threads, locks and time
//
// Within Run, std::thread, std::mutex, std::shared_mutex, std::condition_variable, sleeping and
// both clocks of this process are simulated. All threads share a real thread, and exactly one runs
// at a time. A random generator picks the next thread whenever one waits, and often when it takes
// or releases a lock. Time stands still while any thread can run, and jumps to the next deadline
// when none can. A thread that yields sleeps for a moment. So a seed determines the order of
// events, and hours pass in milliseconds.
//
// This file's library defines functions of the C library, which take precedence over the originals.
// The code under test is neither changed nor compiled differently.

struct Outcome {
  // "" if `body` returned and every thread ended. Otherwise the thread that hung, and where each
  // thread waits; this process must then run no further job.
  std::string hang;
  double seconds = 0;        // simulated time
  uint64_t switches = 0;     // between threads
  uint64_t fingerprint = 0;  // hash of the order of switches: equal if two runs were alike
};

// Runs `body` as the first thread. The run hangs if no thread can run, or after `limit_s` of
// simulated time.
Outcome Run(uint64_t seed, double limit_s, const std::function<void()>& body);

// Returns whether the caller is a simulated thread.
bool IsPlayed();

// Returns a random number of the seed. Call within Run.
uint64_t Random(uint64_t below);

// Mixes a number into the fingerprint. Call within Run.
void Note(uint64_t number);

// ----- waits of the nodes' threads
//
// A job's threads wait for conditions, for a time, and for the end of other threads. These waits
// are numbered from 0, in the order in which the job reaches them. Waits for locks get no number:
// a thread that holds a lock is not in one of those waits, so it soon releases the lock.

struct Wait {
  uint64_t number = 0;
  int node = 0;
  bool for_condition = false;
  double limit_s = 0;  // until the deadline; 0: no deadline
};

enum class Waking {
  kUsual,
  kAtOnce,  // without a reason
  kLate     // by kHeldUpS, or at the deadline
};
// Seconds by which a wait is held up: shorter than any timeout.
constexpr double kHeldUpS = 0.3;

// Makes every thread of a node call `reach` before it waits, until this world ends.
void ListenToWaits(std::function<Waking(const Wait&)> reach);
// Assigns the caller, and threads that it starts, to a node.
void BelongTo(int node);
// Lets the caller run before all other threads from now on, whenever it can run.
void GoFirst();

// ----- probes of base/invariant.h that seeds reach, and their effects

constexpr size_t kNumProbes = static_cast<size_t>(ps::Probe::kNumProbes);

// "WindowFull"
std::string NameOfProbe(int number);

// Listens to all probes for the rest of the process.
void ListenToProbes();

// Sets how the current job reacts to probes: `then` is called with the probe's number, and the
// total of probes reached so far. If `disturbed`, threads may yield or sleep there.
void BeginProbes(bool disturbed, std::function<void(int probe, int reached)> then);
// Ends the reaction to probes. Call when the job is over.
void EndProbes();

// Number of jobs that reached each probe, and the totals.
class ProbeTable {
 public:
  // Adds the probes of the last job.
  void Add();
  // Returns a table in Markdown, followed by the probes that were never reached.
  std::string Print() const;

 private:
  std::array<uint64_t, kNumProbes> jobs_{};
  std::array<uint64_t, kNumProbes> times_{};
};

// ----- a seed's plan for a job: sizes, settings, faults

constexpr double kPeerTimeoutS = 3;
constexpr double kStartTimeoutS = 5;
constexpr double kOpTimeoutS = 4;
constexpr double kLongOpTimeoutS = 12;
// Grace period of a late replica. It is longer than all delays of links and threads, so only
// replicas that hang exceed it.
constexpr double kGraceS = 3;
// Time that a job waits for another server: longer than starting one takes.
constexpr double kReplaceS = 10;
// Time that nodes and a restarted scheduler wait for each other. It is longer than the scheduler is
// away, and too short for waiting sums to time out.
constexpr double kReturnS = 3;
constexpr uint64_t kMostAwayMs = 600;
// Seconds that a kept server waits: longer than the launcher takes to restart workers.
constexpr double kKeepTimeoutS = 20;
constexpr int kPartitionBytes = 8192;

struct Fault {
  enum Kind { kKill, kPause, kReset, kDelay, kStop, kNumKinds, kQuit, kStick, kWake, kHoldUp };
  Kind kind;
  // Moment of the fault: this time; or, if not 0, after this number of probes; or, if not -1, at
  // this probe. kQuit: a worker finishes after some rounds, before the others. kStick: a replica's
  // program hangs for a while, but heartbeats go on. kWake, kHoldUp: a waiting thread continues
  // without a reason, or late.
  double at_s = 0;
  int at_reached = 0;
  int at_probe = -1;
  // The fault happens at this wait (Wait::number). Then `node` and `peer` are numbers of nodes.
  int64_t at_wait = -1;
  int after_rounds = 0;
  // Indices in the job: 0 is the scheduler, then come servers, then workers. The fault hits the
  // nodes that have these indices at that moment.
  int node;
  int peer;
  double seconds;  // duration of a pause or delay

  bool IsInTime() const { return kind != kQuit && !IsAtProbe() && at_wait < 0; }
  bool IsAtProbe() const { return at_reached > 0 || at_probe >= 0; }
  bool IsOfANode() const { return kind == kKill || kind == kPause || kind == kStop; }
  std::string Describe() const;
};

struct Plan {
  int workers = 1;
  int servers = 1;
  int rounds = 1;
  int tensors = 1;
  size_t settings = 0;  // index into Settings()
  bool keep = false;
  bool returns = false;  // a killed scheduler restarts
  bool goes_on = false;  // workers go on after an operation that failed alone
  bool backups = false;  // servers have copies of each other's state, and are replaced
  int burst = 0;  // number of sums of one tensor that workers start together, at different times
  bool updates = false;  // servers keep this number of parameters, too
  size_t parameters = 0;
  int on_gpu = -1;         // rank of the worker with tensors on a GPU
  bool disturbed = false;  // threads that reach a probe are delayed
  std::vector<size_t> counts;
  std::vector<Fault> faults;
  bool releases = false;  // workers release names after some rounds, and sum them again

  // Releases returns whether a name is released after a round; the others return the number of its
  // releases before a round, and the number of its values in a round.
  bool Releases(int tensor, int round) const;
  int LifeAt(int tensor, int round) const;
  size_t CountAt(int tensor, int round) const;
  std::string Describe() const;
};

// Returns the settings. Call once before any simulation, because reading the environment is slow,
// and because objects that live as long as the process must be the same for every seed.
const std::vector<core::Config>& Settings();
// Settings for replicas, with enough time for sums. One replica may be late (BYTEPS_QUORUM), lost
// servers may be replaced, or the scheduler may restart.
const std::vector<core::Config>& ReplicaSettings(bool patient, bool replaces, bool returns);

// Settings for 2 or 3 servers that copy each other's state. `patient`: a replica may be late.
const std::vector<core::Config>& BackupSettings(int servers, bool patient);

// Returns the plan of the seed. Call within Run.
Plan MakePlan();
// Returns a job whose servers keep copies of each other's state. Servers are lost, and links break.
Plan MakeBackupPlan();

// ----- a network between the nodes of a job, with faults
//
// A pair of nodes has one link. Messages of membership arrive in order, one at a time, and data
// messages in any order, several at a time. The loss of a link is reported to both nodes. A node
// that joins another generation has another life: messages to its earlier life do not reach it.
//
// Written with ordinary threads and locks, which are simulated.

class SimulatedChannel;

inline std::chrono::steady_clock::duration Duration(double seconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(seconds));
}

// Returns whether a message belongs to membership.
inline bool IsControl(const ps::Message& message) { return !message.meta.control.empty(); }

// The links, and their faults.
class Network {
 public:
  Network();
  ~Network();

  // Returns a number for a new process of a node, its life. No earlier process has had this number.
  uint64_t NewLife() { return ++lives_; }
  // Gives a node its address, unless another node has it.
  void Add(SimulatedChannel* node);
  // Removes a node's address, and closes all its links in good order.
  void Leave(SimulatedChannel* node);

  // Sends a message, which arrives within a millisecond, or when its link is released. It is lost
  // if there is no link. `expected`: life of the receiver; the message waits for a link to it.
  void Carry(const SimulatedChannel& from, int to, uint64_t expected, ps::Message message);

  // Returns whether the scheduler has a link with this process of the node.
  bool IsLinked(int node, uint64_t life);
  // Makes a link. Returns false if one of the nodes is dead.
  bool Link(int a, int b);
  // Makes a link, or tells `from` that the peer is absent, or in another generation.
  void Connect(const SimulatedChannel& from, int to);
  // Ends a link; messages in flight are lost. Each end with an `End` is told after it has got the
  // earlier messages. `how`: the reason; the flag says whether the peer closed the link.
  struct End {
    std::string how;
    bool by_peer = false;
    bool orderly = false;
  };
  void Unlink(int a, int b, const End* at_a, const End* at_b);
  // Closes the scheduler's link with this process of a node, after a goodbye.
  void Close(int node, uint64_t life);

  // ----- faults; nodes are numbers, the scheduler is 0

  // Reports to both ends that the link was reset.
  void Reset(int a, int b);
  // Ends a node's process: its links close, and it neither sends nor receives.
  void Kill(int node);
  // Lets another process take the rank of a killed one.
  void Revive(int node);
  // Makes a node silent for some seconds: its messages wait, and other nodes notice only the
  // silence.
  void Pause(int node, double seconds);
  // Makes a link hold its messages for some seconds.
  void Delay(int a, int b, double seconds);

  // Workers that the scheduler has admitted.
  int admitted() const { return admitted_; }

 private:
  friend class SimulatedChannel;
  using Clock = std::chrono::steady_clock;
  using Pair = std::pair<int, int>;
  struct Item {
    int from = 0;
    int to = 0;
    uint64_t from_life = 0;
    uint64_t to_life = 0;
    uint64_t link = 0;  // link of the message; 0 for an end
    ps::Message message;
    bool is_end = false;
    End end;
  };

  static Pair PairOf(int a, int b) { return a < b ? Pair(a, b) : Pair(b, a); }
  void Run();
  void Deliver(Item item);
  // Call with mu_ held:
  uint64_t LifeOf(int node) const;
  void TellOfEnd(const SimulatedChannel& node, int peer, const std::string& how);
  void SendWaiting(const Pair& pair);
  void ForgetWaiting(int node);
  Clock::time_point ArrivalOf(int from, int to, bool in_order);

  std::mutex mu_;
  std::condition_variable cond_;
  std::map<int, SimulatedChannel*> nodes_;
  std::set<int> killed_;
  struct LinkState {
    uint64_t number = 0;
    std::map<int, uint64_t> lives;  // lives of both ends
  };
  std::map<Pair, LinkState> links_;
  uint64_t next_link_ = 1;
  std::multimap<Clock::time_point, Item> under_way_;
  std::list<Item> waiting_;  // messages that wait for a link
  std::map<int, Clock::time_point> paused_;
  std::map<Pair, Clock::time_point> delayed_;
  std::map<Pair, Clock::time_point> last_;  // (from, to): arrival of the last message in order
  bool stopping_ = false;
  std::atomic<int> admitted_{0};
  std::atomic<uint64_t> lives_{0};
  std::atomic<int> generation_{1};  // the scheduler's generation
  std::atomic<uint64_t> job_{0};    // number of the job
  std::thread thread_;
};

// ----- the nodes of a job on a simulated network
//
// Each has a real Membership and a real Engine or SumServer, as in a Session; van and connections
// are simulated by the same rules.

// Convert a node's number to its address, and back.
std::string AddressOf(int number);
int NumberOf(const std::string& address);

struct NodeSettings {
  ps::Node::Role role = ps::Node::WORKER;
  int number = 0;  // number of the node; determines its address
  int rank = 0;    // rank of a worker
  int workers = 1;
  int servers = 1;
  double peer_timeout_s = 3;
  double start_timeout_s = 5;
  bool keep = false;
  double keep_timeout_s = 0;
  bool rejoin = false;
  int replicas = 1;
  double replace_servers_s = 0;
  bool backups = false;
  double scheduler_return_s = 0;
};

class SimulatedChannel : public core::Channel {
 public:
  SimulatedChannel(Network* network, const NodeSettings& settings);
  ~SimulatedChannel() override;

  void Start(core::ChannelUser* user) override;
  void Leave(const ps::Farewell& farewell) override { membership_->AsNode()->Leave(farewell); }
  void StopByOrder(const std::string& how) { membership_->StopByOrder(how); }
  void Stop() override;
  void Send(const core::Message& message) override { Transmit(core::ToPs(message)); }
  void Abandon(const void* begin, size_t bytes) override;
  bool RegistersMemory() const override { return false; }
  double link_gbps() const override { return membership_->AsNode()->link_mbps() / 1e3; }
  bool is_late() const override;
  bool lacks_scheduler() const override;
  void SayReady() override;
  void AskToAdmit(int replica, int life) override;
  void SayAwaited(int rank, const std::string& name, uint32_t round) override;
  void SayLate(int rank, const std::string& why) override;
  int rank() const override;
  std::string NameOfServer(int rank) override;
  std::string NameOfWorker(int rank) override;

  int number() const { return settings_.number; }
  uint64_t life() const { return life_; }
  // Generation of the job; connections of a server belong to one generation.
  int generation() const { return generation_; }

  // Called by the network.
  void Receive(int from, uint64_t from_life, ps::Message message);
  void OnEnd(int from, uint64_t from_life, const Network::End& end);

 private:
  class Links;
  struct Event {
    int from = 0;
    uint64_t from_life = 0;
    ps::Message message;
    bool is_end = false;
    Network::End end;
  };
  struct Placing {
    char* begin;
    size_t bytes;
    bool abandoned;
  };

  void StartOnce();
  void Transmit(ps::Message message);
  void ReceiveControl();
  void ReceiveData();
  void HandleEnd(const Event& event);
  // Moves the values to their destination, or into memory of the channel.
  ps::SArray<char> Place(const ps::Meta& meta, const ps::SArray<char>& values);
  // Returns kEmpty if the node has no id.
  int IdOf(int number, uint64_t life) const;
  int FindId(int number, uint64_t life) const;  // call with mu_ held
  // Finds the sender of data. Returns false if the sender is not known yet: the data wait.
  bool NameSender(Event* event);
  core::Role role() const;

  Network* const network_;
  const NodeSettings settings_;
  std::atomic<uint64_t> life_{0};
  std::atomic<int> generation_{0};
  std::atomic<uint64_t> job_{0};
  core::ChannelUser* user_ = nullptr;
  core::EarlyMessages early_;
  std::unique_ptr<Links> links_;
  std::unique_ptr<ps::Membership> membership_;

  mutable std::mutex mu_;
  std::condition_variable control_cond_;
  std::condition_variable data_cond_;
  // Guarded by mu_:
  struct Name {
    int number = 0;
    uint64_t life = 0;   // 0: any
    bool comes = false;  // a server that connects to this one
  };
  std::map<int, Name> names_;  // by node id
  std::deque<Event> control_;
  std::deque<Event> data_;
  std::list<Event> unnamed_;  // from servers that the scheduler has not announced yet
  bool closed_ = true;

  std::mutex place_mu_;
  std::list<Placing> placing_;  // guarded by place_mu_
  std::vector<std::thread> threads_;
};

}  // namespace simulation

namespace core {

// ----- a GPU of one worker, in simulated time

struct Stream;

}  // namespace core

namespace simulation {

constexpr int kGpu = 0;  // the only one

// Makes all objects that live as long as the process. Call once, before any simulation.
void MakeGpu(uint64_t pinned_bytes, uint64_t streamed_bytes, uint64_t largest);

// The stream in which the worker computes.
core::DeviceStream UserStream();
// Adds work to that stream.
void Compute(std::function<void()> work);

// Runs the streams' work, until this object is destroyed and no work is left. Use it within Run.
class Gpu {
 public:
  Gpu();
  ~Gpu();

  // Waits until all streams have done their work.
  void AwaitIdle();

 private:
  void Run();
  // A stream with work to do; null at the end.
  core::Stream* Next();

  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace simulation
}  // namespace byteps

#endif  // BYTEPS_TESTS_SIMULATION_WORLD_H_
