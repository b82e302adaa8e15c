// Simulates whole jobs under seeded schedules of messages and losses, and checks conditions.
//
//   simulate [--from N] [--seeds N] [--verbose] [--twice] [--break-invariant]
//            [--replicas | --backups] [--each-wait [--most N] [--wait N]]
//
// A seed is a job: some workers, some servers, a scheduler, with the real Worker, SumServer and
// Membership, on simulated network, threads and time (world.h). The seed decides sizes, settings,
// the order of all events, and the faults. Conditions:
//
// - Nothing hangs: all nodes end within a bound that follows from the timeouts. Scheduler and
//   servers that no worker has joined may wait for one; the test then ends them.
// - The sums that workers get are right, whatever happens to other nodes: each push was added once.
// - Without faults, no node fails, and each server makes each of its sums once.
// - A node that fails gives a reason that names the fault.
// - In half of the jobs scheduler and servers outlive failures (--keep). A simulated launcher
//   starts another number of workers, and a server for a killed one. Such a job ends well unless
//   the scheduler was killed, and no sum contains pushes of an older generation.
//
// Half of the jobs delay threads that reach a probe (base/invariant.h); in the end the program
// prints how many jobs reached each probe. No invariant (base/invariant.h) may be broken;
// --break-invariant breaks one in each job, to check that it is noticed.
//
// --replicas simulates jobs with several replicas, some of which die and come back; --backups jobs
// whose servers keep copies of each other's state (job.h).
//
// --each-wait plays each job, then again for each of its waits and each way to end that wait
// (each_wait.h). --most: number of waits per place in the code; --wait: only this wait.
//
// --twice runs each seed twice, and compares the order of events. Exit status: 0 all conditions
// held; 1 a violation, printed with the seed; 2 bad usage.
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
#include <vector>

#include "each_wait.h"
#include "job.h"
#include "replica_job.h"
#include "world.h"

namespace byteps {
namespace simulation {

namespace {

// Bound for a job: the time of a silent peer, of an operation that waits for it, and of a shutdown
// that waits for it. A worker that continues may need these times repeatedly.
constexpr double kLimitS = 150;
// Bound for a job whose workers are restarted.
constexpr double kKeptLimitS = 900;

struct Options {
  uint64_t from = 1;
  uint64_t seeds = 1000;
  bool verbose = false;
  bool twice = false;
  bool progress = false;  // prints a line for every 500 seeds
  bool breaks_invariant = false;
  bool replicas = false;
  bool backups = false;
  EachWait* each_wait = nullptr;
  std::vector<Fault> faults;  // added to the seed's, with each_wait
};

struct Totals {
  uint64_t failed_jobs = 0;
  uint64_t generations = 0;
  uint64_t removed = 0;
  uint64_t joins = 0;
  uint64_t short_sums = 0;
  uint64_t replaced = 0;
  uint64_t returns = 0;
  uint64_t switches = 0;
  double seconds = 0;
  uint64_t fingerprint = 0;  // fingerprint of the last run
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

// Returns false if a condition was violated.
bool RunSeed(uint64_t seed, const Options& options, Totals* totals) {
  std::string story, verdict;
  bool failed = false;
  bool kept = false;
  std::function<std::string()> describe;  // description of the current job
  const Outcome outcome = Run(seed, kKeptLimitS, [&] {
    if (options.replicas) return PlayReplicas(options, &describe, &verdict, &story, totals);
    Plan plan = options.backups ? MakeBackupPlan() : MakePlan();
    if (options.each_wait != nullptr) {
      plan.faults.insert(plan.faults.end(), options.faults.begin(), options.faults.end());
      plan.burst = 0;  // thousands of similar waits
      options.each_wait->BeginJob(plan);
    }
    kept = plan.keep;
    Job job(plan, options.breaks_invariant);
    describe = [&job] { return job.Describe(); };
    job.Run();
    verdict = job.Verdict();
    failed = options.backups ? !job.ended_well() : job.failed();
    totals->generations += job.generations();
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

// Each seed runs in its own process: otherwise leftovers of earlier seeds would influence it, and
// it could not be repeated alone. Threads that hang end with it.
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
  uint64_t most = 0;
  int64_t wait = -1;
  bool each_wait = false;
  const option names[] = {
      {"each-wait", no_argument, nullptr, 'e'},       {"most", required_argument, nullptr, 'm'},
      {"wait", required_argument, nullptr, 'w'},      {"from", required_argument, nullptr, 'f'},
      {"seeds", required_argument, nullptr, 's'},     {"verbose", no_argument, nullptr, 'v'},
      {"twice", no_argument, nullptr, 't'},           {"progress", no_argument, nullptr, 'p'},
      {"replicas", no_argument, nullptr, 'r'},        {"backups", no_argument, nullptr, 'c'},
      {"break-invariant", no_argument, nullptr, 'b'}, {nullptr, 0, nullptr, 0}};
  for (int c; (c = getopt_long(argc, argv, "", names, nullptr)) != -1;) {
    if (c == 'f') options.from = strtoull(optarg, nullptr, 10);
    if (c == 's') options.seeds = strtoull(optarg, nullptr, 10);
    if (c == 'v') options.verbose = true;
    if (c == 't') options.twice = true;
    if (c == 'p') options.progress = true;
    if (c == 'r') options.replicas = true;
    if (c == 'c') options.backups = true;
    if (c == 'e') each_wait = true;
    if (c == 'm') most = strtoull(optarg, nullptr, 10);
    if (c == 'w') wait = strtoll(optarg, nullptr, 10);
    if (c == 'b') options.breaks_invariant = true;
    if (c == '?') return 2;
  }
  if (each_wait && options.replicas) return 2;
  // Logging takes a lock, which affects the order: log the same with and without --verbose.
  setenv("BYTEPS_LOG_LEVEL", "INFO", 1);
  (void)ReplicaSettings(false, false, false);
  (void)BackupSettings(2, false);
  MakeGpu(Settings()[0].Int("BYTEPS_PINNED_BYTES"), Settings()[0].Int("BYTEPS_STREAMED_BYTES"),
          kPartitionBytes);
  ListenToProbes();
  // Logs of jobs that fail as expected are of no use.
  if (!options.verbose && freopen("/dev/null", "w", stderr) == nullptr) return 1;
  Totals& totals = *MakeShared<Totals>();
  if (each_wait) options.each_wait = new EachWait(most, wait);
  bool failed = false;
  for (uint64_t seed = options.from; seed < options.from + options.seeds; ++seed) {
    const uint64_t done = seed - options.from;
    if (options.progress && done % 500 == 0) {
      printf("[%llu/%llu] seeds\n", static_cast<unsigned long long>(done),
             static_cast<unsigned long long>(options.seeds));
      fflush(stdout);
    }
    if (options.each_wait != nullptr) {
      const auto play = [&](const std::vector<Fault>& faults) {
        options.faults = faults;
        return RunInChild(seed, options, &totals);
      };
      failed = !options.each_wait->Run(play) || failed;
      continue;
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
  if (options.each_wait != nullptr) {
    fputs(options.each_wait->Print().c_str(), stdout);
    return failed ? 1 : 0;
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
        "%llu schedules held: %llu jobs failed as they should, %llu generations, %.0f s passed, "
        "%llu switches\n",
        number(options.seeds), number(totals.failed_jobs), number(totals.generations),
        totals.seconds, number(totals.switches));
  }
  fputs(totals.probes.Print().c_str(), stdout);
  return 0;
}

}  // namespace
}  // namespace simulation
}  // namespace byteps

int main(int argc, char** argv) { return byteps::simulation::Main(argc, argv); }
