#include "byteps/observe/trace.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/process.h"
#include "byteps/base/protocol.h"

namespace byteps {
namespace core {
namespace {

// Time after the last addition until the last round counts as complete.
constexpr auto kQuiet = std::chrono::seconds(1);

int64_t RealMinusSteady() {
  int64_t difference = 0;
  int64_t least = INT64_MAX;
  // The fastest reading counts, because it was not interrupted.
  for (int i = 0; i < 20; ++i) {
    const int64_t before = SteadyNs();
    const auto real = std::chrono::system_clock::now().time_since_epoch();
    const int64_t took = SteadyNs() - before;
    if (took >= least) continue;
    least = took;
    difference =
        std::chrono::duration_cast<std::chrono::nanoseconds>(real).count() - (before + took / 2);
  }
  return difference;
}

// Writes the events of a process. Times are SteadyNs.
class EventWriter {
 public:
  // The viewer needs process numbers that are unique in a job.
  EventWriter(Role role, int rank, int64_t real_minus_steady)
      : process_(std::to_string((role == Role::kServer ? 1000001 : 1) + rank)),
        real_minus_steady_(real_minus_steady) {}

  void Name(const char* what, int thread, const std::string& name) {
    Event("M", what, thread, "\"args\":{\"name\":" + ps::JsonText(name) + "}");
  }

  // Writes the begin ("b") or end ("e") of a slice in this row.
  void RowEnd(const char* phase, size_t row, const std::string& name, int64_t time,
              const std::string& args) {
    Event(phase, name, 0,
          At(time) + ",\"cat\":\"partition\",\"id2\":{\"local\":\"" + std::to_string(row) + "\"}" +
              args);
  }

  void Slice(const char* name, int thread, int64_t begin, int64_t end, const std::string& args) {
    Event("X", name, thread,
          At(begin) + ",\"dur\":" + Microseconds(end - begin) + ",\"cat\":\"thread\"" + args);
  }

  void Arrow(TraceArrow arrow, int thread, int64_t time, uint64_t number) {
    const char phase[] = {static_cast<char>(arrow), '\0'};
    const std::string ends = arrow == TraceArrow::kEnds ? ",\"bp\":\"e\"" : "";
    Event(phase, "partition", thread,
          At(time) + ",\"cat\":\"flow\",\"id\":\"" + std::to_string(number) + "\"" + ends);
  }

  std::string TakeEvents() { return std::move(events_); }

 private:
  static std::string Microseconds(int64_t nanoseconds) {
    char text[40];
    snprintf(text, sizeof(text), "%.3f", static_cast<double>(nanoseconds) / 1000);
    return text;
  }

  std::string At(int64_t time) const {
    const int64_t real = time + real_minus_steady_;
    char text[48];
    snprintf(text, sizeof(text), "\"ts\":%lld.%03lld", static_cast<long long>(real / 1000),
             static_cast<long long>(real % 1000));
    return text;
  }

  void Event(const char* phase, const std::string& name, int thread, const std::string& rest) {
    events_ += events_.empty() ? "" : ",\n";
    events_ += std::string("{\"ph\":\"") + phase + "\",\"name\":" + ps::JsonText(name) +
               ",\"pid\":" + process_ + ",\"tid\":" + std::to_string(thread) + "," + rest + "}";
  }

  const std::string process_;
  const int64_t real_minus_steady_;
  std::string events_;
};

std::string Arguments(const TracedPartition& p, bool failed) {
  return ",\"args\":{\"tensor\":" + ps::JsonText(p.tensor) +
         ",\"partition\":" + std::to_string(p.index) + ",\"round\":" + std::to_string(p.round) +
         ",\"worker\":" + std::to_string(p.worker) + ",\"bytes\":" + std::to_string(p.bytes) +
         (failed ? ",\"failed\":true}" : "}");
}

// Returns the number of a partition's arrow. The files of the worker and of the server have the
// same number.
uint64_t ArrowNumber(const TracedPartition& p) {
  const uint64_t parts[] = {p.key, p.round, static_cast<uint64_t>(p.worker)};
  return HashBytes(parts, sizeof(parts), 0);
}

// Writes to a temporary file and renames it at the end, so that readers see the whole file or none.
bool WriteFile(const std::string& path, const std::string& text) {
  const std::string part = path + ".part";
  std::ofstream out(part, std::ios::binary);
  out << text;
  out.close();
  return out && rename(part.c_str(), path.c_str()) == 0;
}

}  // namespace

namespace {

// Returns the first and the last round to record.
std::pair<uint32_t, uint32_t> RoundsOf(const Config& config) {
  const std::string& text = config.String("BYTEPS_TRACE_STEPS");
  if (text.empty()) {
    return {static_cast<uint32_t>(config.Int("BYTEPS_TRACE_START_STEP")),
            static_cast<uint32_t>(config.Int("BYTEPS_TRACE_END_STEP"))};
  }
  int first = -1;
  int last = -1;
  char rest = 0;
  if (sscanf(text.c_str(), "%9d-%9d%c", &first, &last, &rest) != 2 || first < 0 || last < first) {
    throw UsageError("BYTEPS_TRACE_STEPS='" + text +
                     "' is not FIRST-LAST: 10-12 are three rounds, and 0-0 is the first one");
  }
  return {static_cast<uint32_t>(first), static_cast<uint32_t>(last)};
}

}  // namespace

std::unique_ptr<Tracer> Tracer::Make(const Config& config) {
  if (!config.Bool("BYTEPS_TRACE_ON")) return nullptr;
  return std::unique_ptr<Tracer>(new Tracer(config));
}

Tracer::Tracer(const Config& config)
    : folder_(config.String("BYTEPS_TRACE_DIR")),
      first_round_(RoundsOf(config).first),
      last_round_(RoundsOf(config).second),
      limit_(config.Int("BYTEPS_TRACE_LIMIT")),
      real_minus_steady_(RealMinusSteady()) {
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (!std::filesystem::is_directory(folder_) || access(folder_.c_str(), W_OK) != 0) {
    throw UsageError("BYTEPS_TRACE_DIR='" + folder_ +
                     "' is no folder that this process can write to" +
                     (error ? ": " + error.message() : ""));
  }
}

Tracer::~Tracer() { End(); }

void Tracer::Begin(Role role, int rank) {
  ps::MutexLock lock(&mu_);
  role_ = role;
  rank_ = rank;
  if (thread_.joinable() || ended_) return;
  thread_ = std::thread([this] {
    NameThisThread("timeline");
    Run();
  });
}

int Tracer::AddThread(const std::string& name) {
  ps::MutexLock lock(&mu_);
  threads_.push_back(name);
  return static_cast<int>(threads_.size());
}

void Tracer::AddRow(const TracedPartition& partition, int64_t begin,
                    const std::vector<TraceStage>& stages) {
  Row row{partition, begin, {}, false};
  for (TraceStage stage : stages) {
    row.failed = stage.end == 0;
    if (row.failed) stage.end = SteadyNs();
    row.stages.push_back(stage);
    if (row.failed) break;
  }
  ps::MutexLock lock(&mu_);
  if (!has_last_ && partition.round == last_round_) {
    has_last_ = true;
    cond_.NotifyAll();
  }
  if (rows_.size() < limit_) {
    rows_.push_back(std::move(row));
  } else {
    ++dropped_;
  }
}

void Tracer::AddSlice(const TracedPartition& partition, int thread, const char* name, int64_t begin,
                      TraceArrow arrow) {
  const Slice slice{partition, thread, name, begin, SteadyNs(), arrow};
  ps::MutexLock lock(&mu_);
  if (slices_.size() < limit_) slices_.push_back(slice);
}

std::string Tracer::Json() const {
  EventWriter events(role_, rank_, real_minus_steady_);
  events.Name("process_name", 0, std::string(NameOf(role_)) + " " + std::to_string(rank_));
  for (size_t i = 0; i < threads_.size(); ++i) {
    events.Name("thread_name", static_cast<int>(i) + 1, threads_[i]);
  }
  for (size_t number = 0; number < rows_.size(); ++number) {
    const Row& row = rows_[number];
    const std::string& title = row.partition.tensor;
    events.RowEnd("b", number, title, row.begin, Arguments(row.partition, row.failed));
    int64_t begin = row.begin;
    for (const TraceStage& stage : row.stages) {
      events.RowEnd("b", number, stage.name, begin, "");
      events.RowEnd("e", number, stage.name, stage.end, "");
      begin = stage.end;
    }
    events.RowEnd("e", number, title, begin, "");
  }
  for (const Slice& s : slices_) {
    events.Slice(s.name, s.thread, s.begin, s.end, Arguments(s.partition, false));
    if (s.arrow == TraceArrow::kNone) continue;
    // The arrow starts at the slice's begin. Readers round times (a double has a resolution of 0.25
    // us here), and could take a later time to be outside of a short slice.
    events.Arrow(s.arrow, s.thread, s.begin, ArrowNumber(s.partition));
  }
  return "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"dropped_partitions\":" +
         std::to_string(dropped_) + "},\"traceEvents\":[\n" + events.TakeEvents() + "\n]}\n";
}

void Tracer::Run() {
  ps::MutexLock lock(&mu_);
  // The wait is ended by the last round or by End; deadline: none, an idle thread's.
  cond_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return ended_ || has_last_; });
  size_t before = 0;
  while (!ended_) {
    const size_t now = rows_.size() + slices_.size() + dropped_;
    if (now == before) Write();
    before = now;
    // The wait is ended by End; deadline: the next look.
    cond_.WaitFor(&mu_, kQuiet, [this]() PS_REQUIRES(mu_) { return ended_; });
  }
}

void Tracer::End() {
  {
    ps::MutexLock lock(&mu_);
    if (!ended_ && rank_ >= 0) Write();
    ended_ = true;
  }
  cond_.NotifyAll();
  // The thread was told to stop, so this wait is ended by its return; deadline: none.
  if (thread_.joinable()) thread_.join();
}

void Tracer::Write() {
  static int written_before = 0;  // counts over this process's jobs, which run one after another
  const size_t recorded = rows_.size() + slices_.size() + dropped_;
  if (!path_.empty() && in_file_ == recorded) return;
  if (path_.empty()) {
    const int number = ++written_before;
    path_ = folder_ + "/byteps-" + NameOf(role_) + "-" + std::to_string(rank_) +
            (number > 1 ? "." + std::to_string(number) : "") + ".json";
  }
  in_file_ = recorded;
  if (!WriteFile(path_, Json())) {
    BPS_LOG(ERROR) << "cannot write the timeline to " << path_ << " (BYTEPS_TRACE_DIR)";
  } else if (dropped_ > 0) {
    BPS_LOG(WARNING) << "the timeline " << path_ << " lacks the last " << dropped_
                     << " partitions, as it holds " << limit_
                     << ": choose fewer rounds (BYTEPS_TRACE_STEPS)";
  }
}

}  // namespace core
}  // namespace byteps
