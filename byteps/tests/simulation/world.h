// The world in which jobs are played: threads and time that a seed decides, what it plans for a
// job, the network between the nodes, the nodes, and a GPU.
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

// ----- threads, locks and time that a seed decides
//
// Within Run, std::thread, std::mutex, std::shared_mutex, std::condition_variable, sleeping and
// both clocks of this process are played: all threads share one, exactly one of them runs at a
// time, and a random generator picks which goes on whenever one waits, and often when it takes or
// gives up a lock.  Time stands still while any thread can run, and jumps to the next deadline when
// none can; to yield is to sleep for a moment.  So one seed is one order of events, always the
// same, and hours pass in milliseconds.
//
// It works by defining the C library's functions of those names, which come before the library's
// own.  The code under test is not changed, nor compiled differently.

struct Outcome {
  // Empty: `body` returned and every thread ended.  Otherwise what hung, and where each thread
  // waits; then nothing more may be run in this process.
  std::string hang;
  double seconds = 0;        // that passed for the threads
  uint64_t switches = 0;     // between threads
  uint64_t fingerprint = 0;  // of their order: equal when two runs were alike
};

// Runs `body` as the first thread.  It hangs when no thread can go on, or `limit_s` seconds have
// passed for them.
Outcome Run(uint64_t seed, double limit_s, const std::function<void()>& body);

// Whether the caller is a thread within Run.
bool IsPlayed();

// For whatever else the seed decides; within Run.
uint64_t Random(uint64_t below);

// Mixes a number into the fingerprint; within Run.
void Note(uint64_t number);

// ----- Waits of the nodes' threads.
//
// A job's waits for conditions, for time to pass and for threads to end are numbered from 0, in the
// order in which it reaches them.  Locks are none: who holds one does not wait.

struct Wait {
  uint64_t number = 0;
  int node = 0;
  bool for_condition = false;
  double limit_s = 0;  // until its deadline; 0: it has none
};

enum class Waking {
  kUsual,
  kAtOnce,  // for no reason
  kLate     // longer by kHeldUpS, or until the deadline
};
// Shorter than any timeout.
constexpr double kHeldUpS = 0.3;

// `reach` is called by each thread of a node that is about to wait, until this world ends.
void ListenToWaits(std::function<Waking(const Wait&)> reach);
// The caller, and the threads that it starts, are a node's.
void BelongTo(int node);
// The caller goes on before all others, whenever it can go on.
void GoFirst();

// ----- Which of base/invariant.h's probes the seeds reach, and what a seed does there.

constexpr size_t kNumProbes = static_cast<size_t>(ps::Probe::kNumProbes);

// "WindowFull"
std::string NameOfProbe(int number);

// Listens to all probes, for as long as the process lives.
void ListenToProbes();

// What happens when the job of the seed that is played reaches a probe: `then` is called with its
// number, and how often the job has reached some.  If `disturbed`, the thread may yield or sleep
// there.
void BeginProbes(bool disturbed, std::function<void(int probe, int reached)> then);
// The job is over.
void EndProbes();

// Jobs that reached each probe, and how often all of them did.
class ProbeTable {
 public:
  // Adds what the last job has reached.
  void Add();
  // A table, in Markdown, and below it those that nobody reached.
  std::string Print() const;

 private:
  std::array<uint64_t, kNumProbes> jobs_{};
  std::array<uint64_t, kNumProbes> times_{};
};

// ----- What a seed decides of a job before it starts: sizes, settings, and what breaks.

constexpr double kPeerTimeoutS = 3;
constexpr double kStartTimeoutS = 5;
constexpr double kOpTimeoutS = 4;
constexpr double kLongOpTimeoutS = 12;
// Longer than links and threads are held up, so that it is for replicas that stand still.
constexpr double kGraceS = 3;
// How long a job waits for another server: longer than it takes to start one.
constexpr double kReplaceS = 10;
// How long nodes wait for a scheduler that died, and it for them: longer than it is away, and so
// short that sums which wait meanwhile do not end.
constexpr double kReturnS = 3;
constexpr uint64_t kMostAwayMs = 600;
// Longer than the launcher takes to start workers again.
constexpr double kKeepTimeoutS = 20;
constexpr int kPartitionBytes = 8192;

struct Fault {
  enum Kind { kKill, kPause, kReset, kDelay, kStop, kNumKinds, kQuit, kStick, kWake, kHoldUp };
  Kind kind;
  // When it happens: at this time; or when probes have been reached so often, if that is not 0; or
  // when this probe is, if it is not -1.  kQuit: a worker ends well after so many rounds, before
  // the others.  kStick: a replica's program does nothing for a while; its heartbeats go on.
  // kWake, kHoldUp: the thread that waits goes on for no reason, or late.
  double at_s = 0;
  int at_reached = 0;
  int at_probe = -1;
  // When a thread waits, as Wait has its number; nodes are numbers then, not places.
  int64_t at_wait = -1;
  int after_rounds = 0;
  // Places in the job: 0 the scheduler, then servers, then workers.  When it happens, the nodes
  // that have them then.
  int node;
  int peer;
  double seconds;  // of a pause or delay

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
  bool returns = false;  // the scheduler, when it was killed
  bool goes_on = false;  // a worker goes on after an operation that failed alone
  bool backups = false;  // servers have copies of each other's state, and are replaced when lost
  int burst = 0;         // workers begin so many sums of one tensor at once, at different times
  bool updates = false;  // servers keep parameters as well, of so many elements
  size_t parameters = 0;
  int on_gpu = -1;         // rank of the worker whose tensors are on a GPU
  bool disturbed = false;  // threads that reach a probe are held up
  std::vector<size_t> counts;
  std::vector<Fault> faults;
  bool releases = false;  // workers release names after some rounds, and sum them anew

  // Whether a name is released after a round, how often it was before one, and how many values it
  // has in a round.
  bool Releases(int tensor, int round) const;
  int LifeAt(int tensor, int round) const;
  size_t CountAt(int tensor, int round) const;
  std::string Describe() const;
};

// To be called once before anything is played: the environment is slow, and what lives as long as
// the process must be the same for each seed.
const std::vector<core::Config>& Settings();
// The same for replicas: one may be late (BYTEPS_QUORUM); a server that is lost may be replaced;
// the scheduler may return, for which sums have time.
const std::vector<core::Config>& ReplicaSettings(bool patient, bool replaces, bool returns);

// The same where so many servers (2 or 3) have copies of each other's state.  `patient`: one of
// several replicas may be late.
const std::vector<core::Config>& BackupSettings(int servers, bool patient);

// Within Run.
Plan MakePlan();
// Of a job whose servers have copies of each other's state: servers are lost, and links break.
Plan MakeBackupPlan();

// ----- A network between the nodes of a job that loses what it is told to.
//
// A pair of nodes has one link, messages of membership come in order and one at a time, those of
// data come in any order and several at a time, and a link that ends says so at both its ends.  A
// node that joins again, in another generation of the job, has another life: what was sent to its
// last one does not reach it.
//
// All of it is written with ordinary threads and locks, which are played.

class SimulatedChannel;

inline std::chrono::steady_clock::duration Duration(double seconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(seconds));
}

// Whether it is one of membership.
inline bool IsControl(const ps::Message& message) { return !message.meta.control.empty(); }

// What happens to the links.
class Network {
 public:
  Network();
  ~Network();

  // A number that no life of a node has had.
  uint64_t NewLife() { return ++lives_; }
  // It has its address, unless another one has.
  void Add(SimulatedChannel* node);
  // It has none any more, and all its links are closed in good order.
  void Leave(SimulatedChannel* node);

  // A message in flight.  Within a millisecond, or when what holds its link lets go.
  // Lost where there is no link.  `expected`: a life of the receiver, for whose link it waits.
  void Carry(const SimulatedChannel& from, int to, uint64_t expected, ps::Message message);

  // Whether the scheduler has a link with this life of the node.
  bool IsLinked(int node, uint64_t life);
  // False: one of them is dead.
  bool Link(int a, int b);
  // Makes a link, or tells `from` that nobody is there, or one of another generation.
  void Connect(const SimulatedChannel& from, int to);
  // Ends a link; what is in flight on it is lost.  Each end hears of it once it has received what
  // came before, if it is told: `how`, and whether its peer closed it.
  struct End {
    std::string how;
    bool by_peer = false;
    bool orderly = false;
  };
  void Unlink(int a, int b, const End* at_a, const End* at_b);
  // The scheduler closes a link in good order, if it is still with this life of the node.
  void Close(int node, uint64_t life);

  // ----- faults; nodes are numbers, the scheduler is 0

  // Both ends of the link are told that it was reset.
  void Reset(int a, int b);
  // Its process is gone: its links close, and it neither sends nor receives.
  void Kill(int node);
  // Another process may have its place.
  void Revive(int node);
  // It goes silent for so long: what it sends, and what is sent to it, waits.  Others notice only
  // that nothing comes.
  void Pause(int node, double seconds);
  // The link holds what it carries for so long.
  void Delay(int a, int b, double seconds);

  // Workers that the scheduler has taken into the job.
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
    uint64_t link = 0;  // that it goes by; of an end: 0
    ps::Message message;
    bool is_end = false;
    End end;
  };

  static Pair PairOf(int a, int b) { return a < b ? Pair(a, b) : Pair(b, a); }
  void Run();
  void Deliver(Item item);
  // mu_ is held, for these:
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
    std::map<int, uint64_t> lives;  // of both ends
  };
  std::map<Pair, LinkState> links_;
  uint64_t next_link_ = 1;
  std::multimap<Clock::time_point, Item> under_way_;
  std::list<Item> waiting_;  // for a link
  std::map<int, Clock::time_point> paused_;
  std::map<Pair, Clock::time_point> delayed_;
  std::map<Pair, Clock::time_point> last_;  // (from, to): when the last one in order arrives
  bool stopping_ = false;
  std::atomic<int> admitted_{0};
  std::atomic<uint64_t> lives_{0};
  std::atomic<int> incarnation_{1};  // that the scheduler is at
  std::atomic<uint64_t> job_{0};     // its number
  std::thread thread_;
};

// ----- The nodes of a job on a simulated network.
//
// Each is a real Membership under a real Engine or SumServer, as in a Session; what the van and its
// connections do is played here, by the same rules.

// The address of a node, and back.
std::string AddressOf(int number);
int NumberOf(const std::string& address);

struct NodeSettings {
  ps::Node::Role role = ps::Node::WORKER;
  int number = 0;  // of the node; its address is made from it
  int rank = 0;    // of a worker
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
  // Of the job; a server's connections are of this one alone.
  int incarnation() const { return incarnation_; }

  // By the network.
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
  // Moves the values to where they belong, or to memory of their own.
  ps::SArray<char> Place(const ps::Meta& meta, const ps::SArray<char>& values);
  // kEmpty: it has none.
  int IdOf(int number, uint64_t life) const;
  int FindId(int number, uint64_t life) const;  // mu_ is held
  // Who has sent these data.  False: it is not known yet, and they wait.
  bool NameSender(Event* event);
  core::Role role() const;

  Network* const network_;
  const NodeSettings settings_;
  std::atomic<uint64_t> life_{0};
  std::atomic<int> incarnation_{0};
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
  std::list<Event> unnamed_;  // of servers of which the scheduler's word is in flight
  bool closed_ = true;

  std::mutex place_mu_;
  std::list<Placing> placing_;  // guarded by place_mu_
  std::vector<std::thread> threads_;
};

}  // namespace simulation

namespace core {

// ----- A GPU of one worker, in time that a seed decides.

struct Stream;

}  // namespace core

namespace simulation {

constexpr int kGpu = 0;  // the only one

// Makes all that lives as long as the process.  Once, before anything is played.
void MakeGpu(uint64_t pinned_bytes, uint64_t streamed_bytes, uint64_t largest);

// The stream in which the worker computes.
core::DeviceStream UserStream();
// Gives it work.
void Compute(std::function<void()> work);

// Works for as long as it lives, and until nothing is left; within Run.
class Gpu {
 public:
  Gpu();
  ~Gpu();

  // Until all streams have done their work.
  void AwaitIdle();

 private:
  void Run();
  // A stream that has something to do; null: this is at its end.
  core::Stream* Next();

  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace simulation
}  // namespace byteps

#endif  // BYTEPS_TESTS_SIMULATION_WORLD_H_
