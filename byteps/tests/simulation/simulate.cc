// Whole jobs under seeded schedules of messages and losses, and what must hold in each.
//
//   simulate [--from N] [--seeds N] [--verbose] [--twice] [--break-invariant]
//            [--replicas | --backups]
//
// Each seed is one job: some workers, some servers, a scheduler, with the real Worker, Server and
// Membership over a network that is played (world.h), in threads and time that are played
// (world.h).  The seed decides the sizes, the settings, the order of all events, and what
// breaks when.  Demanded of each:
//
//   - Nobody hangs: within a bound that follows from the timeouts, each node has ended.  Scheduler
//     and servers that no worker has joined may wait for one; the test then ends them.
//   - A sum that a worker gets is right, whatever happens to others: each push was added once.
//   - Where nothing breaks, nobody fails, and each server made each of its sums once.
//   - Who fails says a reason, which names what broke.
//   - In half of the jobs scheduler and servers outlive failures (--keep), and a launcher that is
//     played starts the workers again, another number of them, and a server for one that was
//     killed: then the job ends well unless the scheduler was killed, and no sum has anything of an
//     older generation in it.
//
// Half of the jobs hold up threads that reach a probe (base/invariant.h); at the end it prints how
// many jobs reached each of them.  No invariant (base/invariant.h) may be broken; --break-invariant
// breaks one in each job, to see that it is noticed.
//
// --replicas plays jobs of several replicas instead, some of which die and come back, --backups
// jobs whose servers keep copies of each other's state (job.h).
//
// --twice runs each seed two times and demands the same order of events.  Exit status: 0 all held;
// 1 not, with the seed and what was seen; 2 bad usage.
#include <getopt.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <string>
#include <type_traits>

#include "job.h"
#include "world.h"

namespace byteps {
namespace simulation {

using core::Config;

std::string Fault::Describe() const {
  static const char* const kNames[] = {"kill", "pause", "reset", "delay",
                                       "stop", "",      "quit",  "stick"};
  char when[64];
  snprintf(when, sizeof(when), "at %.4f s", at_s);
  if (at_reached > 0) snprintf(when, sizeof(when), "at the probe number %d", at_reached);
  if (at_probe >= 0) snprintf(when, sizeof(when), "at %s", NameOfProbe(at_probe).c_str());
  if (kind == kQuit) snprintf(when, sizeof(when), "after %d rounds", after_rounds);
  char text[160];
  snprintf(text, sizeof(text), "%s %s %d-%d for %.2f s", when, kNames[kind], node, peer, seconds);
  return text;
}

std::string Plan::Describe() const {
  std::string text = std::to_string(workers) + " workers, " + std::to_string(servers) +
                     " servers, " + std::to_string(rounds) + " rounds, settings " +
                     std::to_string(settings);
  if (keep) text += ", kept";
  if (returns) text += ", the scheduler returns";
  if (backups) text += ", backups";
  if (goes_on) text += ", goes on";
  if (burst > 0) text += ", a burst of " + std::to_string(burst) + " sums";
  if (updates) text += ", " + std::to_string(parameters) + " parameters";
  if (on_gpu >= 0) text += ", worker " + std::to_string(on_gpu) + " on a GPU";
  if (disturbed) text += ", disturbed";
  if (releases) text += ", releases";
  for (const Fault& fault : faults) text += "\n  " + fault.Describe();
  return text;
}

namespace {

std::vector<Config> MakeSettings(const char* quorum, double replace_s,
                                 double op_timeout_s = kOpTimeoutS) {
  std::vector<Config> made;
  setenv("BYTEPS_REPLACE_SERVERS_S", std::to_string(replace_s).c_str(), 1);
  setenv("BYTEPS_QUORUM", quorum, 1);
  setenv("BYTEPS_GRACE_S", quorum[0] == '0' ? "0" : std::to_string(kGraceS).c_str(), 1);
  for (const char* deterministic : {"0", "1"}) {
    for (const char* threads : {"1", "2"}) {
      for (const char* window : {"0", "12000"}) {
        setenv("BYTEPS_DETERMINISTIC", deterministic, 1);
        setenv("BYTEPS_SERVER_ENGINE_THREAD", threads, 1);
        setenv("BYTEPS_PUSH_THREAD", threads, 1);
        setenv("BYTEPS_SERVER_WINDOW_BYTES", window, 1);
        setenv("BYTEPS_PARTITION_BYTES", std::to_string(kPartitionBytes).c_str(), 1);
        // So few blocks that some have to wait.
        setenv("BYTEPS_PINNED_BYTES", std::to_string(3 * kPartitionBytes).c_str(), 1);
        setenv("BYTEPS_STREAMED_BYTES", std::to_string(4 * kPartitionBytes).c_str(), 1);
        setenv("BYTEPS_OP_TIMEOUT_S", std::to_string(op_timeout_s).c_str(), 1);
        setenv("BYTEPS_PEER_TIMEOUT_S", std::to_string(kPeerTimeoutS).c_str(), 1);
        made.push_back(Config::FromEnvironment());
      }
    }
  }
  return made;
}

}  // namespace

const std::vector<Config>& Settings() {
  static const std::vector<Config> all = MakeSettings("0", 0);
  return all;
}

const std::vector<Config>& ReplicaSettings(bool patient, bool replaces, bool returns) {
  static const std::vector<Config> all[] = {MakeSettings("0", 0),
                                            MakeSettings("1", 0),
                                            MakeSettings("0", kReplaceS),
                                            MakeSettings("1", kReplaceS),
                                            MakeSettings("0", 0, kLongOpTimeoutS),
                                            MakeSettings("1", 0, kLongOpTimeoutS),
                                            MakeSettings("0", kReplaceS, kLongOpTimeoutS),
                                            MakeSettings("1", kReplaceS, kLongOpTimeoutS)};
  return all[(returns ? 4 : 0) + (replaces ? 2 : 0) + (patient ? 1 : 0)];
}

const std::vector<Config>& BackupSettings(int servers, bool patient) {
  static const auto make = [](const char* count, const char* quorum) {
    setenv("BYTEPS_BACKUP_STATE", "1", 1);
    setenv("DMLC_NUM_SERVER", count, 1);
    std::vector<Config> made = MakeSettings(quorum, kReplaceS, kLongOpTimeoutS);
    unsetenv("BYTEPS_BACKUP_STATE");
    unsetenv("DMLC_NUM_SERVER");
    return made;
  };
  static const std::vector<Config> all[] = {make("2", "0"), make("3", "0"), make("2", "1"),
                                            make("3", "1")};
  return all[servers - 2 + (patient ? 2 : 0)];
}

namespace {

Fault MakeFault(const Plan& plan, int number) {
  Fault fault;
  const int nodes = 1 + plan.workers + plan.servers;
  const bool keep = plan.keep;
  fault.kind = static_cast<Fault::Kind>(Random(Fault::kNumKinds));
  fault.at_s = static_cast<double>(Random(40'000)) * 1e-6;
  const uint64_t when = Random(6);
  if (when < 1) fault.at_reached = 1 + static_cast<int>(Random(60));
  if (when == 1 || when == 2) fault.at_probe = static_cast<int>(Random(kNumProbes));
  fault.node = static_cast<int>(Random(nodes));
  fault.peer = static_cast<int>(Random(nodes));
  if (fault.peer == fault.node) fault.peer = (fault.node + 1) % nodes;
  // Some while the next generation gathers, or is at work.
  if (keep && number > 0) fault.at_s = static_cast<double>(Random(8'000)) * 1e-3;
  // Some end before anybody notices, some do not.
  fault.seconds = static_cast<double>(1 + Random(140)) * (Random(2) ? 0.002 : 0.1);
  if (plan.workers > 1 && Random(10) == 0) {
    fault.kind = Fault::kQuit;
    fault.node = 1 + plan.servers + static_cast<int>(Random(plan.workers));
    fault.after_rounds = static_cast<int>(Random(plan.rounds));
  } else if (plan.goes_on && Random(2) == 0) {
    // Operations fail, and the job does not.
    fault.kind = Fault::kDelay;
    fault.node = 1 + static_cast<int>(Random(plan.servers));
    fault.peer = 1 + plan.servers + static_cast<int>(Random(plan.workers));
    fault.seconds = static_cast<double>(3 + Random(12));
  } else if (Random(10) == 0) {
    // Of a worker that goes in good order the connections break.
    fault.kind = Fault::kReset;
    fault.at_reached = 0;
    fault.at_probe = static_cast<int>(Random(2) ? ps::Probe::kSaysGoodbye : ps::Probe::kLastLeaves);
    fault.node = 1 + static_cast<int>(Random(plan.servers));
    fault.peer = 1 + plan.servers + static_cast<int>(Random(plan.workers));
  }
  return fault;
}

}  // namespace

bool Plan::Releases(int tensor, int round) const {
  const uint64_t seed[] = {counts[0], static_cast<uint64_t>(tensor), static_cast<uint64_t>(round)};
  return releases && core::HashBytes(seed, sizeof(seed), 1) % 2 == 0;
}

int Plan::LifeAt(int tensor, int round) const {
  int lives = 0;
  for (int before = 0; before < round; ++before) lives += Releases(tensor, before) ? 1 : 0;
  return lives;
}

size_t Plan::CountAt(int tensor, int round) const {
  return LifeAt(tensor, round) % 2 == 0 ? counts[tensor] : 1 + counts[tensor] / 2;
}

Plan MakePlan() {
  Plan plan;
  plan.workers = 1 + static_cast<int>(Random(3));
  plan.servers = 1 + static_cast<int>(Random(2));
  plan.rounds = 1 + static_cast<int>(Random(4));
  plan.tensors = 1 + static_cast<int>(Random(2));
  plan.settings = Random(Settings().size());
  plan.keep = Random(2) == 0;
  plan.goes_on = Random(3) == 0;
  plan.updates = Random(2) == 0;
  plan.parameters = 1 + Random(6000);
  // Of an operation that fails some partitions have to wait in the queue.
  if (plan.goes_on && plan.updates) {
    plan.settings |= 1;
    plan.parameters += kPartitionBytes / sizeof(float);
  }
  if (Random(4) == 0) plan.on_gpu = static_cast<int>(Random(plan.workers));
  plan.disturbed = Random(2) == 0;
  for (int i = 0; i < plan.tensors; ++i) plan.counts.push_back(1 + Random(6000));
  // In a third of the jobs nothing breaks, in most others one thing.
  const uint64_t dice = Random(6);
  const int faults = dice < 2 ? 0 : dice < 5 ? 1 : 2;
  for (int i = 0; i < faults; ++i) plan.faults.push_back(MakeFault(plan, i));
  plan.returns = !plan.keep && Random(3) == 0;
  for (uint64_t deaths = plan.returns ? 1 + Random(2) : 0; deaths > 0; --deaths) {
    Fault fault = MakeFault(plan, 0);
    fault.kind = Fault::kKill;
    fault.node = 0;
    if (Random(3) == 0) fault.at_probe = static_cast<int>(ps::Probe::kSaysGoodbye);
    plan.faults.push_back(fault);
  }
  // More than a server would keep of a worker that is ahead.
  if (Random(100) == 0) plan.burst = 2100;
  plan.releases = Random(2) == 0;
  return plan;
}

Plan MakeBackupPlan() {
  Plan plan;
  plan.backups = plan.updates = true;
  plan.workers = 1 + static_cast<int>(Random(3));
  plan.servers = 2 + static_cast<int>(Random(2));
  plan.rounds = 2 + static_cast<int>(Random(7));
  plan.tensors = 1;
  plan.settings = Random(BackupSettings(plan.servers, false).size());
  plan.parameters = 1 + Random(6000);
  plan.disturbed = Random(2) == 0;
  plan.counts.push_back(1 + Random(3000));
  for (uint64_t faults = Random(4); faults > 0; --faults) {
    Fault fault;
    const uint64_t kind = Random(10);
    fault.kind = kind < 6   ? Fault::kKill
                 : kind < 8 ? Fault::kReset
                 : kind < 9 ? Fault::kPause
                            : Fault::kDelay;
    fault.at_s = static_cast<double>(Random(60'000)) * 1e-6;
    const uint64_t when = Random(4);
    if (when < 1) fault.at_reached = 1 + static_cast<int>(Random(200));
    if (when == 1 || when == 2) fault.at_probe = static_cast<int>(Random(kNumProbes));
    fault.node = 1 + static_cast<int>(Random(plan.servers));
    fault.peer = 1 + static_cast<int>(Random(plan.servers + plan.workers));
    if (fault.peer == fault.node) fault.peer = 1 + plan.servers;
    fault.seconds = static_cast<double>(1 + Random(60)) * (Random(2) ? 0.002 : 0.1);
    plan.faults.push_back(fault);
  }
  plan.releases = Random(2) == 0;
  return plan;
}

namespace {

// A silent peer, then an operation that lacks it, then a shutdown that waits for it; several times
// where a worker goes on after that.
constexpr double kLimitS = 150;
// The same for a job whose workers are started again.
constexpr double kKeptLimitS = 900;

struct Options {
  uint64_t from = 1;
  uint64_t seeds = 1000;
  bool verbose = false;
  bool twice = false;
  bool progress = false;  // a line for every 500 seeds
  bool breaks_invariant = false;
  bool replicas = false;
  bool backups = false;
};

struct Totals {
  uint64_t failed_jobs = 0;
  uint64_t incarnations = 0;
  uint64_t removed = 0;
  uint64_t joins = 0;
  uint64_t short_sums = 0;
  uint64_t replaced = 0;
  uint64_t returns = 0;
  uint64_t switches = 0;
  double seconds = 0;
  uint64_t fingerprint = 0;  // of the last one
  ProbeTable probes;
};

void PlayReplicas(const Options& options, std::function<std::string()>* describe,
                  std::string* verdict, std::string* story, Totals* totals) {
  ReplicaJob job;
  *describe = [&job] { return job.Describe(); };
  job.Run();
  *verdict = job.Verdict();
  totals->failed_jobs += job.removed() > 0 ? 1 : 0;
  totals->removed += job.removed();
  totals->joins += job.joins();
  totals->short_sums += job.short_sums();
  totals->replaced += job.replaced();
  totals->returns += job.returns();
  if (options.verbose || !verdict->empty()) *story = job.Describe();
}

// False when something did not hold.
bool RunSeed(uint64_t seed, const Options& options, Totals* totals) {
  std::string story, verdict;
  bool failed = false;
  bool kept = false;
  std::function<std::string()> describe;  // of the job that is played
  const Outcome outcome = Run(seed, kKeptLimitS, [&] {
    if (options.replicas) return PlayReplicas(options, &describe, &verdict, &story, totals);
    const Plan plan = options.backups ? MakeBackupPlan() : MakePlan();
    kept = plan.keep;
    Job job(plan, options.breaks_invariant);
    describe = [&job] { return job.Describe(); };
    job.Run();
    verdict = job.Verdict();
    failed = options.backups ? !job.ended_well() : job.failed();
    totals->incarnations += job.incarnations();
    totals->replaced += job.replaced();
    if (options.verbose || !verdict.empty()) story = job.Describe();
  });
  if (!outcome.hang.empty()) {
    verdict = outcome.hang;
    if (describe) story = describe();
  }
  if (verdict.empty() && !kept && outcome.seconds > kLimitS) verdict = "it took too long";
  if (options.verbose || !verdict.empty()) {
    printf("seed %llu: %s, %.3f s, %llu switches, fingerprint %016llx\n  %s\n",
           static_cast<unsigned long long>(seed), verdict.empty() ? "good" : verdict.c_str(),
           outcome.seconds, static_cast<unsigned long long>(outcome.switches),
           static_cast<unsigned long long>(outcome.fingerprint), story.c_str());
  }
  EndProbes();
  totals->probes.Add();
  totals->fingerprint = outcome.fingerprint;
  totals->failed_jobs += failed ? 1 : 0;
  totals->switches += outcome.switches;
  totals->seconds += outcome.seconds;
  return verdict.empty();
}

template <typename T>
T* MakeShared() {
  static_assert(std::is_trivially_copyable_v<T>);
  void* const memory =
      mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) abort();
  return new (memory) T();
}

// Each seed has a process of its own: what earlier ones left in the process must not decide what
// it does, else one that fails could not be played again alone.  Threads that hang end with it.
bool RunInChild(uint64_t seed, const Options& options, Totals* totals) {
  fflush(stdout);
  const pid_t child = fork();
  if (child < 0) abort();
  if (child == 0) {
    const bool held = RunSeed(seed, options, totals);
    fflush(stdout);
    _exit(held ? 0 : 1);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFSIGNALED(status)) {
    printf("seed %llu: ended by signal %d\n", static_cast<unsigned long long>(seed),
           WTERMSIG(status));
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int Main(int argc, char** argv) {
  Options options;
  const option names[] = {{"from", required_argument, nullptr, 'f'},
                          {"seeds", required_argument, nullptr, 's'},
                          {"verbose", no_argument, nullptr, 'v'},
                          {"twice", no_argument, nullptr, 't'},
                          {"progress", no_argument, nullptr, 'p'},
                          {"replicas", no_argument, nullptr, 'r'},
                          {"backups", no_argument, nullptr, 'c'},
                          {"break-invariant", no_argument, nullptr, 'b'},
                          {nullptr, 0, nullptr, 0}};
  for (int c; (c = getopt_long(argc, argv, "", names, nullptr)) != -1;) {
    if (c == 'f') options.from = strtoull(optarg, nullptr, 10);
    if (c == 's') options.seeds = strtoull(optarg, nullptr, 10);
    if (c == 'v') options.verbose = true;
    if (c == 't') options.twice = true;
    if (c == 'p') options.progress = true;
    if (c == 'r') options.replicas = true;
    if (c == 'c') options.backups = true;
    if (c == 'b') options.breaks_invariant = true;
    if (c == '?') return 2;
  }
  // To write a line takes a lock, and that is part of the order: alike with and without --verbose.
  setenv("BYTEPS_LOG_LEVEL", "INFO", 1);
  (void)ReplicaSettings(false, false, false);
  (void)BackupSettings(2, false);
  MakeGpu(Settings()[0].Int("BYTEPS_PINNED_BYTES"), Settings()[0].Int("BYTEPS_STREAMED_BYTES"),
          kPartitionBytes);
  ListenToProbes();
  // Logs of jobs that fail as they should say nothing.
  if (!options.verbose && freopen("/dev/null", "w", stderr) == nullptr) return 1;
  Totals& totals = *MakeShared<Totals>();
  for (uint64_t seed = options.from; seed < options.from + options.seeds; ++seed) {
    const uint64_t done = seed - options.from;
    if (options.progress && done % 500 == 0) {
      printf("[%llu/%llu] seeds\n", static_cast<unsigned long long>(done),
             static_cast<unsigned long long>(options.seeds));
      fflush(stdout);
    }
    if (!RunInChild(seed, options, &totals)) return 1;
    if (!options.twice) continue;
    const uint64_t fingerprint = totals.fingerprint;
    if (!RunInChild(seed, options, &totals)) return 1;
    if (totals.fingerprint != fingerprint) {
      printf("seed %llu: the same seed gave another order of events\n",
             static_cast<unsigned long long>(seed));
      return 1;
    }
  }
  const auto number = [](uint64_t n) { return static_cast<unsigned long long>(n); };
  if (options.replicas) {
    printf(
        "%llu schedules held: %llu jobs lost a replica, %llu were removed, %llu ranks joined, %llu "
        "sums lacked members, %llu servers were replaced, %llu schedulers returned, %.0f s passed, "
        "%llu switches\n",
        number(options.seeds), number(totals.failed_jobs), number(totals.removed),
        number(totals.joins), number(totals.short_sums), number(totals.replaced),
        number(totals.returns), totals.seconds, number(totals.switches));
  } else if (options.backups) {
    printf(
        "%llu schedules held: %llu servers were replaced, %llu jobs failed as they should, "
        "%.0f s passed, %llu switches\n",
        number(options.seeds), number(totals.replaced), number(totals.failed_jobs), totals.seconds,
        number(totals.switches));
  } else {
    printf(
        "%llu schedules held: %llu jobs failed as they should, %llu incarnations, %.0f s passed, "
        "%llu switches\n",
        number(options.seeds), number(totals.failed_jobs), number(totals.incarnations),
        totals.seconds, number(totals.switches));
  }
  fputs(totals.probes.Print().c_str(), stdout);
  return 0;
}

}  // namespace
}  // namespace simulation
}  // namespace byteps

int main(int argc, char** argv) { return byteps::simulation::Main(argc, argv); }
