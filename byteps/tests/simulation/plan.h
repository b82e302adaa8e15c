// What a seed decides of a job before it starts: sizes, settings, and what breaks.
#ifndef BYTEPS_TESTS_SIMULATION_PLAN_H_
#define BYTEPS_TESTS_SIMULATION_PLAN_H_

#include <cstddef>
#include <string>
#include <vector>

#include "byteps/base/config.h"

namespace byteps {
namespace simulation {

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
  enum Kind { kKill, kPause, kReset, kDelay, kStop, kNumKinds, kQuit, kStick } kind;
  // When it happens: at this time; or when probes have been reached so often, if that is not 0; or
  // when this probe is, if it is not -1.  kQuit: a worker ends well after so many rounds, before
  // the others.  kStick: a replica's program does nothing for a while; its heartbeats go on.
  double at_s = 0;
  int at_reached = 0;
  int at_probe = -1;
  int after_rounds = 0;
  // Places in the job: 0 the scheduler, then servers, then workers.  When it happens, the nodes
  // that have them then.
  int node;
  int peer;
  double seconds;  // of a pause or delay

  bool IsInTime() const { return kind != kQuit && at_reached == 0 && at_probe < 0; }
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
  bool updates = false;  // servers keep parameters as well, of so many elements
  size_t parameters = 0;
  int on_gpu = -1;         // rank of the worker whose tensors are on a GPU
  bool disturbed = false;  // threads that reach a probe are held up
  std::vector<size_t> counts;
  std::vector<Fault> faults;

  std::string Describe() const;
};

// To be called once before anything is played: the environment is slow, and what lives as long as
// the process must be the same for each seed.
const std::vector<core::Config>& Settings();
// The same for replicas: one may be late (BYTEPS_QUORUM); a server that is lost may be replaced;
// the scheduler may return, for which sums have time.
const std::vector<core::Config>& ReplicaSettings(bool patient, bool replaces, bool returns);

// The same where so many servers (2 or 3) have copies of each other's state.
const std::vector<core::Config>& BackupSettings(int servers);

// Within Run.
Plan MakePlan();
// Of a job whose servers have copies of each other's state: servers are lost, and links break.
Plan MakeBackupPlan();

}  // namespace simulation
}  // namespace byteps
#endif  // BYTEPS_TESTS_SIMULATION_PLAN_H_
