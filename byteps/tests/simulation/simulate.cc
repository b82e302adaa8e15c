// Whole jobs under seeded schedules of messages and losses, and what must hold in each.
//
//   simulate [--from N] [--seeds N] [--verbose] [--twice]
//
// Each seed is one job: some workers, some servers, a scheduler, with the real Worker, Server and
// Membership over a network that is played (network.h), in threads and time that are played
// (virtual_threads.h).  The seed decides the sizes, the settings, the order of all events, and what
// breaks when.  Demanded of each:
//
//   - Nobody hangs: within a bound that follows from the timeouts, each node has ended.  A
//   scheduler
//     and servers that no worker has joined may wait for one; the test then ends them.
//   - A sum that a worker gets is right, whatever happens to others: each push was added once.
//   - Where nothing breaks, nobody fails, and each server made each of its sums once.
//   - Who fails says a reason, which names what broke.
//   - In half of the jobs scheduler and servers outlive failures (--keep), and a launcher that is
//     played starts the workers again, another number of them, and a server for one that was
//     killed: then the job ends well unless the scheduler was killed, and no sum has anything of an
//     older incarnation in it.
//
// --twice runs each seed two times and demands the same order of events.  Exit status: 0 all held;
// 1 not, with the seed and what was seen; 2 bad usage.
#include <getopt.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/base/error.h"
#include "byteps/cluster/session.h"
#include "byteps/engine/worker.h"
#include "byteps/server/sum_server.h"
#include "network.h"
#include "virtual_threads.h"

namespace byteps {
namespace simulation {
namespace {

using core::Config;

constexpr double kPeerTimeoutS = 3;
constexpr double kStartTimeoutS = 5;
constexpr double kOpTimeoutS = 4;
// Longer than the launcher takes to start workers again.
constexpr double kKeepTimeoutS = 20;
// A silent peer, then an operation that lacks it, then a shutdown that waits for it.
constexpr double kLimitS = 90;
// The same for a job whose workers are started again, up to so many times.
constexpr int kMaxIncarnations = 10;
constexpr double kKeptLimitS = 900;
// When the last worker is gone, so long the others may take to find out.
constexpr double kAfterwardsS = 40;
constexpr int kPartitionBytes = 4096;

struct Fault {
  enum Kind { kKill, kPause, kReset, kDelay, kNumKinds } kind;
  double at_s;
  // Places in the job: 0 the scheduler, then servers, then workers.  When it happens, the nodes
  // that have them then.
  int node;
  int peer;
  double seconds;  // of a pause or delay

  std::string Describe() const {
    static const char* const kNames[] = {"kill", "pause", "reset", "delay"};
    char text[96];
    snprintf(text, sizeof(text), "at %.4f s %s %d-%d for %.2f s", at_s, kNames[kind], node, peer,
             seconds);
    return text;
  }
};

struct Plan {
  int workers = 1;
  int servers = 1;
  int rounds = 1;
  int tensors = 1;
  size_t settings = 0;  // index into Settings()
  bool keep = false;
  std::vector<size_t> counts;
  std::vector<Fault> faults;
};

// Read once: the environment is slow.
const std::vector<Config>& Settings() {
  static const std::vector<Config> all = [] {
    std::vector<Config> made;
    for (const char* fused : {"1", "0"}) {
      for (const char* deterministic : {"0", "1"}) {
        for (const char* threads : {"1", "2"}) {
          setenv("BYTEPS_FUSED_PUSH_PULL", fused, 1);
          setenv("BYTEPS_DETERMINISTIC", deterministic, 1);
          setenv("BYTEPS_SERVER_ENGINE_THREAD", threads, 1);
          setenv("BYTEPS_PUSH_THREAD", threads, 1);
          setenv("BYTEPS_PARTITION_BYTES", std::to_string(kPartitionBytes).c_str(), 1);
          setenv("BYTEPS_OP_TIMEOUT_S", std::to_string(kOpTimeoutS).c_str(), 1);
          setenv("BYTEPS_PEER_TIMEOUT_S", std::to_string(kPeerTimeoutS).c_str(), 1);
          setenv("BYTEPS_LOG_LEVEL", "FATAL", 1);
          made.push_back(Config::FromEnvironment());
        }
      }
    }
    return made;
  }();
  return all;
}

Plan MakePlan() {
  Plan plan;
  plan.workers = 1 + static_cast<int>(Random(3));
  plan.servers = 1 + static_cast<int>(Random(2));
  plan.rounds = 1 + static_cast<int>(Random(3));
  plan.tensors = 1 + static_cast<int>(Random(2));
  plan.settings = Random(Settings().size());
  plan.keep = Random(2) == 0;
  for (int i = 0; i < plan.tensors; ++i) plan.counts.push_back(1 + Random(2500));
  const int nodes = 1 + plan.workers + plan.servers;
  // In a third of the jobs nothing breaks, in most others one thing.
  const uint64_t dice = Random(6);
  const int faults = dice < 2 ? 0 : dice < 5 ? 1 : 2;
  for (int i = 0; i < faults; ++i) {
    Fault fault;
    fault.kind = static_cast<Fault::Kind>(Random(Fault::kNumKinds));
    fault.at_s = static_cast<double>(Random(40'000)) * 1e-6;
    fault.node = static_cast<int>(Random(nodes));
    fault.peer = static_cast<int>(Random(nodes));
    if (fault.peer == fault.node) fault.peer = (fault.node + 1) % nodes;
    // Some while the next incarnation gathers, or is at work.
    if (plan.keep && i > 0) fault.at_s = static_cast<double>(Random(8'000)) * 1e-3;
    // Some end before anybody notices, some do not.
    fault.seconds = static_cast<double>(1 + Random(100)) * (Random(2) ? 0.002 : 0.1);
    plan.faults.push_back(fault);
  }
  return plan;
}

// A node of one incarnation, and what it ended with.  A server or scheduler may live through many.
struct NodeRecord {
  ps::Node::Role role;
  int rank = 0;
  bool done = false;
  std::string error;  // empty: well
};

// Another one in each incarnation, so that a push of an older one would be seen in a sum.
float InputOf(uint64_t incarnation, uint64_t rank, uint64_t tensor, uint64_t round,
              uint64_t index) {
  return static_cast<float>(
      (incarnation * 15485863 + rank * 7919 + tensor * 104729 + round * 1299709 + index * 31) %
      200'003);
}

class Job {
 public:
  explicit Job(Plan plan) : plan_(std::move(plan)), config_(Settings()[plan_.settings]) {}

  void Run() {
    std::thread chaos([this] { Break(); });
    pthread_setname_np(chaos.native_handle(), "faults");
    std::vector<std::thread> kept;
    Start(&kept, ps::Node::SCHEDULER, 0, 0, 0);
    for (int i = 0; i < plan_.servers; ++i) Start(&kept, ps::Node::SERVER, i, 0, 0);
    int workers = plan_.workers;
    for (int incarnation = 1;; ++incarnation) {
      incarnations_ = incarnation;
      const size_t first = records_.size();
      std::vector<std::thread> threads;
      for (int i = 0; i < workers; ++i) {
        Start(&threads, ps::Node::WORKER, i, workers, incarnation);
      }
      for (auto& thread : threads) thread.join();
      const bool went_well =
          std::all_of(records_.begin() + static_cast<long>(first), records_.end(),
                      [](const auto& record) { return record->error.empty(); });
      ended_well_ = went_well;
      if (went_well || !plan_.keep || incarnation == kMaxIncarnations) break;
      // A launcher sees who is gone, and starts others.
      std::this_thread::sleep_for(std::chrono::milliseconds(100 + Random(1000)));
      for (int i = 0; i < plan_.servers; ++i) {
        if (IsGone(1 + i)) Start(&kept, ps::Node::SERVER, i, 0, 0);
      }
      workers = 1 + static_cast<int>(Random(3));
    }
    for (double waited = 0; waited < kAfterwardsS && !records_[0]->done; waited += 0.5) {
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
    }
    if (!records_[0]->done) {
      if (network_.admitted() > 0) {
        wrong_ = "the scheduler still waits, though workers had come";
      }
      scheduler_->End();
    }
    for (auto& thread : kept) thread.join();
    chaos.join();
  }

  // Why it is wrong; empty if all is well.
  std::string Verdict() const {
    if (!wrong_.empty()) return wrong_;
    for (size_t node = 0; node < records_.size(); ++node) {
      const std::string& error = records_[node]->error;
      if (error.empty() || IsVictim(static_cast<int>(node))) continue;
      if (plan_.faults.empty()) return NameOf(node) + " failed, though nothing broke: " + error;
      if (!NamesACause(error)) return NameOf(node) + " blames what did not break: " + error;
    }
    // One that is paused is not lost for good, and one that is killed is replaced.
    const bool may_go_on = !killed_scheduler_ && plan_.keep;
    if (may_go_on && !ended_well_) return "no incarnation of the job ended well";
    if (!plan_.faults.empty()) return "";
    uint64_t wanted = 0;
    for (const size_t count : plan_.counts) {
      wanted += plan_.rounds * ((count * sizeof(float) + kPartitionBytes - 1) / kPartitionBytes);
    }
    if (wanted == sums_) return "";
    return "the servers made " + std::to_string(sums_) + " sums, not " + std::to_string(wanted);
  }

  std::string Describe() const {
    std::string text = std::to_string(plan_.workers) + " workers, " +
                       std::to_string(plan_.servers) + " servers, " + std::to_string(plan_.rounds) +
                       " rounds, settings " + std::to_string(plan_.settings) +
                       (plan_.keep ? ", kept" : "");
    for (const Fault& fault : plan_.faults) text += "\n  " + fault.Describe();
    for (size_t i = 0; i < records_.size(); ++i) {
      text += "\n  " + NameOf(i) + ": " +
              (!records_[i]->done           ? "has not ended"
               : records_[i]->error.empty() ? "ended well"
                                            : records_[i]->error);
    }
    return text;
  }

  bool failed() const {
    return std::any_of(records_.begin(), records_.end(),
                       [](const auto& record) { return !record->error.empty(); });
  }
  int incarnations() const { return incarnations_; }

 private:
  // What a server or the scheduler hears.
  class NodeUser : public core::ChannelUser {
   public:
    explicit NodeUser(core::Server* server) : server_(server) {}
    void OnMessage(ps::Message* message) override {
      if (server_ != nullptr) server_->OnMessage(message);
    }
    void OnEvent(const ps::MembershipEvent& event) override {
      if (event.kind == ps::MembershipEvent::kNodeLeft && server_ != nullptr) {
        return server_->OnWorkerGone(event.rank, event.reason);
      }
      if (event.next_incarnation > 0) return;  // the scheduler goes on
      std::lock_guard<std::mutex> lock(mu_);
      if (event.kind == ps::MembershipEvent::kFailed && failure_.empty()) failure_ = event.reason;
      ended_ = true;
      cond_.notify_all();
    }
    void End() {
      std::lock_guard<std::mutex> lock(mu_);
      ended_ = true;
      cond_.notify_all();
    }
    std::string AwaitEnd() {
      std::unique_lock<std::mutex> lock(mu_);
      cond_.wait(lock, [this] { return ended_; });
      return failure_;
    }

   private:
    core::Server* const server_;
    std::mutex mu_;
    std::condition_variable cond_;
    bool ended_ = false;
    std::string failure_;
  };

  NodeSettings SettingsOf(ps::Node::Role role, int number, int rank, int workers) const {
    NodeSettings settings;
    settings.role = role;
    settings.number = number;
    settings.rank = rank;
    settings.workers = workers;
    settings.servers = plan_.servers;
    settings.peer_timeout_s = kPeerTimeoutS;
    settings.start_timeout_s = kStartTimeoutS;
    settings.keep = plan_.keep && role != ps::Node::WORKER;
    settings.keep_timeout_s = kKeepTimeoutS;
    return settings;
  }

  // Starts a node, under the next number, at its place of the job.
  void Start(std::vector<std::thread>* threads, ps::Node::Role role, int rank, int workers,
             int incarnation) {
    const int number = static_cast<int>(records_.size());
    records_.push_back(std::make_unique<NodeRecord>());
    records_.back()->role = role;
    records_.back()->rank = rank;
    const bool worker = role == ps::Node::WORKER;
    const int place = role == ps::Node::SCHEDULER ? 0
                      : worker                    ? 1 + plan_.servers + rank
                                                  : 1 + rank;
    at_place_[place] = number;
    threads->emplace_back([=, this] {
      worker ? RunWorker(number, rank, workers, incarnation) : RunNode(role, number);
    });
    const char* const name = worker ? "worker" : role == ps::Node::SERVER ? "server" : "scheduler";
    pthread_setname_np(threads->back().native_handle(), name);
    // The scheduler is there first: who does not find it tries again, which a van does.
    std::this_thread::sleep_for(std::chrono::microseconds(1 + Random(5000)));
  }

  bool IsGone(int place) const {
    const int number = at_place_.at(place);
    return records_[number]->done || killed_.count(number) > 0;
  }

  void RunNode(ps::Node::Role role, int number) {
    std::string error;
    for (bool rejoin = false;; rejoin = true) {
      NodeSettings settings = SettingsOf(role, number, 0, plan_.workers);
      settings.rejoin = rejoin;
      bool again = false;
      error = ServeOnce(settings, &again);
      if (error.empty() || !again || role == ps::Node::SCHEDULER || !plan_.keep) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    records_[number]->error = error;
    records_[number]->done = true;
  }

  // Why the job failed; empty if it did not.  `again`: it did once the node was in it.
  std::string ServeOnce(const NodeSettings& settings, bool* again) {
    SimulatedChannel channel(&network_, settings);
    std::unique_ptr<core::Server> server;
    if (settings.role == ps::Node::SERVER) {
      server = std::make_unique<core::Server>(config_, &channel);
    }
    NodeUser user(server.get());
    if (settings.role == ps::Node::SCHEDULER) scheduler_ = &user;
    std::string error;
    try {
      channel.Start(&user);
      error = user.AwaitEnd();
      *again = true;
    } catch (const core::JobFailedError& e) {
      error = e.what();
      *again = true;
    } catch (const std::exception& e) {
      error = e.what();
    }
    channel.Stop();
    if (!server) return error;
    for (const core::Metric& metric : server->Metrics()) {
      if (metric.name == "byteps_server_sums_total") sums_ += static_cast<uint64_t>(metric.value);
    }
    return error;
  }

  void RunWorker(int number, int rank, int workers, int incarnation) {
    core::Worker worker;
    std::string error;
    try {
      core::Launch launch;
      launch.rank = rank;
      launch.size = workers;
      worker.Start(config_, launch, plan_.servers,
                   std::make_unique<SimulatedChannel>(
                       &network_, SettingsOf(ps::Node::WORKER, number, rank, workers)));
      for (int round = 0; round < plan_.rounds; ++round) {
        Sum(&worker, {incarnation, rank, workers, round});
      }
    } catch (const std::exception& e) {
      error = e.what();
    }
    worker.Stop(false);
    records_[number]->error = error;
    records_[number]->done = true;
  }

  // Which sums of which worker.
  struct Turn {
    int incarnation;
    int rank;
    int workers;
    int round;
  };

  void Sum(core::Worker* worker, const Turn& turn) {
    std::vector<std::vector<float>> tensors(plan_.tensors);
    std::vector<int64_t> handles;
    std::string error;
    for (int i = 0; i < plan_.tensors; ++i) {
      tensors[i].resize(plan_.counts[i]);
      for (size_t k = 0; k < tensors[i].size(); ++k) {
        tensors[i][k] = InputOf(turn.incarnation, turn.rank, i, turn.round, k);
      }
      core::PushPullRequest request;
      request.tensor.name = "t" + std::to_string(i);
      request.tensor.bytes = tensors[i].size() * sizeof(float);
      request.tensor.average = false;
      request.input = request.output = tensors[i].data();
      request.priority = static_cast<int>(Random(3));
      try {
        handles.push_back(worker->PushPull(request));
      } catch (const core::Error& e) {
        error = e.what();
        break;
      }
    }
    for (size_t i = 0; i < handles.size(); ++i) {
      try {
        if (!worker->WaitFor(handles[i], nullptr, std::chrono::seconds(1000))) {
          wrong_ = "a sum was waited for without end";
        }
        Check(tensors[i], static_cast<int>(i), turn);
      } catch (const core::Error& e) {
        error = e.what();
      }
    }
    if (error.empty()) return;
    // Its memory is read until the worker has stopped.
    worker->Stop(false);
    throw core::Error(error);
  }

  void Check(const std::vector<float>& values, int tensor, const Turn& turn) {
    for (size_t k = 0; k < values.size(); ++k) {
      float wanted = 0;
      for (int rank = 0; rank < turn.workers; ++rank) {
        wanted += InputOf(turn.incarnation, rank, tensor, turn.round, k);
      }
      if (values[k] == wanted) continue;
      wrong_ = "incarnation " + std::to_string(turn.incarnation) + ", tensor " +
               std::to_string(tensor) + ", round " + std::to_string(turn.round) + ", element " +
               std::to_string(k) + " is " + std::to_string(values[k]) + ", not " +
               std::to_string(wanted);
      return;
    }
  }

  void Break() {
    std::vector<Fault> faults = plan_.faults;
    std::sort(faults.begin(), faults.end(),
              [](const Fault& a, const Fault& b) { return a.at_s < b.at_s; });
    double now = 0;
    for (const Fault& fault : faults) {
      std::this_thread::sleep_for(std::chrono::duration<double>(fault.at_s - now));
      now = fault.at_s;
      // A place that nobody has, or has had: then there is nobody to break.
      const auto node = at_place_.find(fault.node);
      const auto peer = at_place_.find(fault.peer);
      const bool of_a_node = fault.kind == Fault::kKill || fault.kind == Fault::kPause;
      if (node == at_place_.end() || (!of_a_node && peer == at_place_.end())) continue;
      const int number = node->second;
      broken_.insert(number);
      if (of_a_node) victims_.insert(number);
      if (!of_a_node) broken_.insert(peer->second);
      switch (fault.kind) {
        case Fault::kKill:
          killed_.insert(number);
          killed_scheduler_ = killed_scheduler_ || number == 0;
          network_.Kill(number);
          break;
        case Fault::kPause:
          network_.Pause(number, fault.seconds);
          break;
        case Fault::kReset:
          network_.Reset(number, peer->second);
          break;
        default:
          network_.Delay(number, peer->second, fault.seconds);
      }
    }
  }

  // It may say what it likes: the others seem to be gone.
  bool IsVictim(int node) const { return victims_.count(node) > 0; }

  bool NamesACause(const std::string& error) const {
    // It came when the others had ended already, or nobody came at all.
    if (error.find("cannot be joined: ") != std::string::npos) return true;
    if (network_.admitted() == 0) return true;
    // Workers may have ended well, or a launcher given up, just before the scheduler saw a loss.
    if (error.find("no worker came within ") != std::string::npos) return true;
    // The scheduler says what it sees; to one that nobody can reach all are silent.
    if (IsVictim(0)) return true;
    for (const int node : broken_) {
      if (error.find("10.0.0." + std::to_string(node) + ":") != std::string::npos ||
          error.find("10.0.0." + std::to_string(node) + ")") != std::string::npos) {
        return true;
      }
      const NodeRecord& record = *records_[node];
      const std::string rank = std::to_string(record.rank);
      if (record.role == ps::Node::WORKER && error.find("worker " + rank) != std::string::npos) {
        return true;
      }
      // Those that did not come have no address yet.
      const size_t missing = error.find("missing: ");
      if (record.role == ps::Node::SERVER && missing != std::string::npos &&
          error.find("server", missing) != std::string::npos) {
        return true;
      }
    }
    return false;
  }

  std::string NameOf(size_t node) const {
    const NodeRecord& record = *records_[node];
    if (record.role == ps::Node::SCHEDULER) return "the scheduler";
    return (record.role == ps::Node::SERVER ? "server" : "worker " + std::to_string(record.rank)) +
           " at 10.0.0." + std::to_string(node);
  }

  const Plan plan_;
  const Config& config_;
  Network network_;
  std::vector<std::unique_ptr<NodeRecord>> records_;  // by number
  std::map<int, int> at_place_;                       // numbers
  std::set<int> broken_;                              // that a fault has had to do with
  std::set<int> victims_;  // that were killed or paused: they may say what they like
  std::set<int> killed_;
  bool killed_scheduler_ = false;
  int incarnations_ = 0;
  bool ended_well_ = false;  // the workers of the last incarnation
  uint64_t sums_ = 0;        // that servers made
  std::string wrong_;
  NodeUser* scheduler_ = nullptr;  // until it has ended
};

struct Options {
  uint64_t from = 1;
  uint64_t seeds = 1000;
  bool verbose = false;
  bool twice = false;
  bool progress = false;  // a line for every 500 seeds
};

struct Totals {
  uint64_t failed_jobs = 0;
  uint64_t incarnations = 0;
  uint64_t switches = 0;
  double seconds = 0;
};

// False when something did not hold.
bool RunSeed(uint64_t seed, const Options& options, uint64_t* fingerprint, Totals* totals) {
  std::string story, verdict;
  bool failed = false;
  bool kept = false;
  const Job* playing = nullptr;
  const Outcome outcome = Run(seed, kKeptLimitS, [&] {
    const Plan plan = MakePlan();
    kept = plan.keep;
    Job job(plan);
    playing = &job;
    job.Run();
    verdict = job.Verdict();
    failed = job.failed();
    totals->incarnations += job.incarnations();
    if (options.verbose || !verdict.empty()) story = job.Describe();
  });
  if (!outcome.hang.empty()) {
    verdict = outcome.hang;
    story = playing != nullptr ? playing->Describe() : "";
  }
  if (verdict.empty() && !kept && outcome.seconds > kLimitS) verdict = "it took too long";
  if (options.verbose || !verdict.empty()) {
    printf("seed %llu: %s, %.3f s, %llu switches, fingerprint %016llx\n  %s\n",
           static_cast<unsigned long long>(seed), verdict.empty() ? "good" : verdict.c_str(),
           outcome.seconds, static_cast<unsigned long long>(outcome.switches),
           static_cast<unsigned long long>(outcome.fingerprint), story.c_str());
  }
  *fingerprint = outcome.fingerprint;
  totals->failed_jobs += failed ? 1 : 0;
  totals->switches += outcome.switches;
  totals->seconds += outcome.seconds;
  return verdict.empty();
}

int Main(int argc, char** argv) {
  Options options;
  const option names[] = {
      {"from", required_argument, nullptr, 'f'}, {"seeds", required_argument, nullptr, 's'},
      {"verbose", no_argument, nullptr, 'v'},    {"twice", no_argument, nullptr, 't'},
      {"progress", no_argument, nullptr, 'p'},   {nullptr, 0, nullptr, 0}};
  for (int c; (c = getopt_long(argc, argv, "", names, nullptr)) != -1;) {
    if (c == 'f') options.from = strtoull(optarg, nullptr, 10);
    if (c == 's') options.seeds = strtoull(optarg, nullptr, 10);
    if (c == 'v') options.verbose = true;
    if (c == 't') options.twice = true;
    if (c == 'p') options.progress = true;
    if (c == '?') return 2;
  }
  Settings();
  // Logs of jobs that fail as they should say nothing.
  if (!options.verbose && freopen("/dev/null", "w", stderr) == nullptr) return 1;
  Totals totals;
  for (uint64_t seed = options.from; seed < options.from + options.seeds; ++seed) {
    const uint64_t done = seed - options.from;
    if (options.progress && done % 500 == 0) {
      printf("[%llu/%llu] seeds\n", static_cast<unsigned long long>(done),
             static_cast<unsigned long long>(options.seeds));
      fflush(stdout);
    }
    uint64_t fingerprint = 0, again = 0;
    if (!RunSeed(seed, options, &fingerprint, &totals)) {
      fflush(stdout);
      _exit(1);  // what hangs cannot be taken down
    }
    if (!options.twice) continue;
    if (!RunSeed(seed, options, &again, &totals)) _exit(1);
    if (again != fingerprint) {
      printf("seed %llu: the same seed gave another order of events\n",
             static_cast<unsigned long long>(seed));
      return 1;
    }
  }
  printf(
      "%llu schedules held: %llu jobs failed as they should, %llu incarnations, %.0f s passed, "
      "%llu switches\n",
      static_cast<unsigned long long>(options.seeds),
      static_cast<unsigned long long>(totals.failed_jobs),
      static_cast<unsigned long long>(totals.incarnations), totals.seconds,
      static_cast<unsigned long long>(totals.switches));
  return 0;
}

}  // namespace
}  // namespace simulation
}  // namespace byteps

int main(int argc, char** argv) { return byteps::simulation::Main(argc, argv); }
