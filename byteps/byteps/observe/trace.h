// Timeline: the history of each partition, for Perfetto (ui.perfetto.dev).
//
// A row shows a partition in one round: on a worker from the push queue to the sum, on a server
// from a worker's push to its answer. The stages of a row follow each other without gaps. A slice
// is the work of a thread. Arrows lead from the worker's push to the server's addition, and on to
// the worker's pull.
//
// Times are CLOCK_REALTIME, so files of hosts with synchronized clocks can be merged.
#ifndef BYTEPS_OBSERVE_TRACE_H_
#define BYTEPS_OBSERVE_TRACE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/base/mutex.h"

namespace byteps {
namespace core {

// Identifies a worker's push.
struct TracedPartition {
  std::string tensor;
  uint64_t key = 0;  // the partition's
  uint64_t index = 0;
  uint32_t round = 0;
  int worker = 0;
  uint64_t bytes = 0;
};

// End of a stage, in SteadyNs; 0: it has not ended.
struct TraceStage {
  const char* name;
  int64_t end;
};

enum class TraceArrow : char { kNone = 0, kBegins = 's', kPasses = 't', kEnds = 'f' };

// Keeps the first BYTEPS_TRACE_LIMIT (internal) rows and as many slices, and counts the others. The
// file is written when the process leaves the job, and earlier once the last round is recorded,
// because a process that is killed never leaves. Thread-safe.
class Tracer {
 public:
  // Returns null if BYTEPS_TRACE_ON is 0. Throws UsageError if BYTEPS_TRACE_DIR cannot be made.
  static std::unique_ptr<Tracer> Make(const Config& config);
  ~Tracer();

  // Sets the role and rank, and starts the thread that writes the file after the last round.
  void Begin(Role role, int rank);

  // Returns whether to trace this round of a tensor.
  bool Wants(uint32_t round) const { return round >= first_round_ && round <= last_round_; }

  // Names a track. Returns the track's number, for AddSlice.
  int AddThread(const std::string& name);

  // Adds a row that starts at `begin`. If a stage has not ended, the row ends now and counts as
  // failed.
  void AddRow(const TracedPartition& partition, int64_t begin,
              const std::vector<TraceStage>& stages);

  // Adds the work of `thread` on a partition, from `begin` until now.
  void AddSlice(const TracedPartition& partition, int thread, const char* name, int64_t begin,
                TraceArrow arrow);

  // Writes byteps-ROLE-RANK.json. Later additions are lost. Files of earlier jobs of this process
  // are kept: the next names end in .2.json, and so on. A failure is logged. Does nothing before
  // Begin.
  void End();

 private:
  struct Row {
    TracedPartition partition;
    int64_t begin;
    std::vector<TraceStage> stages;
    bool failed;
  };

  struct Slice {
    TracedPartition partition;
    int thread;
    const char* name;
    int64_t begin;
    int64_t end;
    TraceArrow arrow;
  };

  explicit Tracer(const Config& config);

  // Body of the thread: writes the file when a second has passed without additions after the last
  // round.
  void Run();
  std::string Json() const PS_REQUIRES(mu_);
  // Writes the file, unless nothing was added since the last time.
  void Write() PS_REQUIRES(mu_);

  const std::string folder_;
  const uint32_t first_round_;
  const uint32_t last_round_;
  const size_t limit_;
  const int64_t real_minus_steady_;  // in ns

  ps::Mutex mu_;
  ps::CondVar cond_;  // signals has_last_ and ended_
  std::thread thread_;
  Role role_ PS_GUARDED_BY(mu_) = Role::kWorker;
  int rank_ PS_GUARDED_BY(mu_) = -1;  // less than 0: before Begin
  bool ended_ PS_GUARDED_BY(mu_) = false;
  bool has_last_ PS_GUARDED_BY(mu_) = false;  // a partition of the last round is recorded
  std::string path_ PS_GUARDED_BY(mu_);       // empty: nothing is written yet
  size_t in_file_ PS_GUARDED_BY(mu_) = 0;     // number of additions when it was written
  uint64_t dropped_ PS_GUARDED_BY(mu_) = 0;
  std::vector<std::string> threads_ PS_GUARDED_BY(mu_);
  std::vector<Row> rows_ PS_GUARDED_BY(mu_);
  std::vector<Slice> slices_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_OBSERVE_TRACE_H_
