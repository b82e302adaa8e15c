// The timeline: what happened to each partition, for Perfetto (ui.perfetto.dev).
//
// A row tells of one partition of one round, on a worker from the push queue to the
// sum, on a server from one worker's push to its answer.  Its stages follow each other
// without a gap.  A slice is the work of a thread; arrows lead from the worker's push
// to the server's addition and on to the worker's pull.
//
// Times are CLOCK_REALTIME, so that the files of one host, and of hosts whose clocks
// agree, can be laid side by side.
#ifndef BYTEPS_OBSERVE_TRACE_H_
#define BYTEPS_OBSERVE_TRACE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/base/mutex.h"

namespace byteps {
namespace core {

// Which push of which worker.
struct TracedPartition {
  std::string tensor;
  uint64_t key = 0;  // of the partition
  uint64_t index = 0;
  uint32_t round = 0;
  int worker = 0;
  uint64_t bytes = 0;
};

// When a stage of a partition ended, in SteadyNs; 0: it did not.
struct TraceStage {
  const char* name;
  int64_t end;
};

enum class TraceArrow : char { kNone = 0, kBegins = 's', kPasses = 't', kEnds = 'f' };

// Thread-safe.  Keeps at most BYTEPS_TRACE_LIMIT (internal) rows and as many slices, the first
// that came, and counts the others.
class Tracer {
 public:
  // None when BYTEPS_TRACE_ON is 0.  Throws UsageError when BYTEPS_TRACE_DIR cannot be
  // made.
  static std::unique_ptr<Tracer> Make(const Config& config);

  // Whether a tensor's round is among those to be traced.
  bool Wants(uint32_t round) const { return round >= first_round_ && round <= last_round_; }

  // Names a track; the result stands for it below.
  int AddThread(const std::string& name);

  // A row that begins at `begin`.  It ends now at the first stage that has not ended, and
  // then counts as failed.
  void AddRow(const TracedPartition& partition, int64_t begin,
              const std::vector<TraceStage>& stages);

  // Work of `thread` on a partition, from `begin` until now.
  void AddSlice(const TracedPartition& partition, int thread, const char* name, int64_t begin,
                TraceArrow arrow);

  // Writes byteps-ROLE-RANK.json; what is added later is lost.  A file that the same
  // process wrote, before it left a job and came back, stays: the next one's name ends
  // in .2.json, and so on.  A failure is logged.
  void Write(Role role, int rank);

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

  std::string Json(Role role, int rank) const PS_REQUIRES(mu_);

  const std::string folder_;
  const uint32_t first_round_;
  const uint32_t last_round_;
  const size_t limit_;
  const int64_t real_minus_steady_;  // ns

  ps::Mutex mu_;
  bool written_ PS_GUARDED_BY(mu_) = false;
  uint64_t dropped_ PS_GUARDED_BY(mu_) = 0;
  std::vector<std::string> threads_ PS_GUARDED_BY(mu_);
  std::vector<Row> rows_ PS_GUARDED_BY(mu_);
  std::vector<Slice> slices_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_OBSERVE_TRACE_H_
