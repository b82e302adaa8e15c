// The status of the cluster: what workers and servers tell of themselves, what the scheduler knows
// of the cluster, and the server of its page.
#ifndef BYTEPS_OBSERVE_STATUS_H_
#define BYTEPS_OBSERVE_STATUS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/base/mutex.h"
#include "byteps/net/link/counters.h"
#include "byteps/net/membership/event.h"
#include "byteps/observe/http_server.h"

namespace byteps {
namespace core {

// What a worker or a server tells the scheduler about itself, with each heartbeat.

// A worker that others waited for.
struct LateWorker {
  uint32_t rank = 0;
  uint64_t sums = 0;     // of which it was the last to push
  uint64_t wait_ns = 0;  // from the first push to its, over all of these sums
};

// Counts are since the start of the process; `clock_ns` is the process's steady clock, to make
// rates of two records.
struct StatusRecord {
  static constexpr uint8_t kVersion = 2;
  static constexpr size_t kMaxLate = 4;
  static constexpr size_t kMaxNics = 8;
  static constexpr size_t kMaxNic = 15;       // bytes of a name, as the kernel has it
  static constexpr size_t kMaxHost = 64;      // bytes; what is longer is cut
  static constexpr size_t kMaxProblem = 300;  // bytes

  Role role = Role::kWorker;
  uint32_t pid = 0;
  std::string host;  // as the machine calls itself
  uint64_t clock_ns = 0;
  uint64_t sent_bytes = 0;      // values: of a worker pushes, of a server sums
  uint64_t received_bytes = 0;  // values
  uint64_t finished = 0;        // of a worker operations, of a server sums
  uint64_t failed = 0;
  uint64_t running = 0;   // operations, or sums that some have pushed and others have not
  uint64_t tensors = 0;   // declared
  uint64_t keys = 0;      // of a server: partitions that it sums
  uint64_t queued = 0;    // of a worker partitions not sent yet, of a server pushes not added yet
  uint64_t busy_ns = 0;   // of a server: time that its threads spent adding
  uint64_t problems = 0;  // warnings and errors in its log
  int64_t problem_unix_ms = 0;   // when the last of them was
  std::string problem;           // what it said
  uint64_t sums_since = 0;       // of a server: complete since the record before
  std::vector<LateWorker> late;  // of a server: of those sums, the worst first
  std::vector<ps::NicReading> nics;

  // At most ps::kMaxReport bytes.
  std::string Pack() const;
  // False when `bytes` are no record of this version; `record` is then undefined.
  static bool Parse(const std::string& bytes, StatusRecord* record);
};

// Fills in what is true of any process: pid, host, clock, NICs, the log's last problem.
void DescribeProcess(StatusRecord* record);

// For which workers the others waited.

// Any thread.
class Lateness {
 public:
  // A sum is complete; the worker of `rank` pushed last, `wait_ns` after the first.
  void Add(int rank, int64_t wait_ns);

  // What was added since the last call: how many sums, and those for whom the others waited
  // longest, at most StatusRecord::kMaxLate.
  void Take(uint64_t* sums, std::vector<LateWorker>* worst);

 private:
  ps::Mutex mu_;
  uint64_t sums_ PS_GUARDED_BY(mu_) = 0;
  std::unordered_map<uint32_t, LateWorker> workers_ PS_GUARDED_BY(mu_);  // by rank
};

// What the scheduler knows of the cluster, as JSON and as text.

// Keeps the newest record of each node, and the rates that it and the one before give.  Any thread.
class StatusBoard {
 public:
  // A node that was not heard of for `patience_s` seconds counts as silent.
  StatusBoard(std::string version, double patience_s)
      : version_(std::move(version)), patience_s_(patience_s) {}

  // The scheduler listens at `host` and `port`; `view` tells who is in its job.
  void Attach(const std::string& host, int port, std::function<ps::JobView()> view);
  // `view` is called no more.  Who asks hears what was true at last.
  void Detach();

  // A node's packed StatusRecord came.  One that cannot be read counts as a problem of the node.
  void OnReport(int node_id, const std::string& report);

  // Those who were in the job are not any more; others come.
  void OnIncarnation();

  // One object, docs/use/observability.md tells its members.
  std::string Json();
  // A table for a terminal.
  std::string Text();

 private:
  using Clock = std::chrono::steady_clock;

  // Bytes per second over a NIC.
  struct NicRates {
    double sent = 0;
    double received = 0;
  };
  struct Entry {
    StatusRecord record;
    Clock::time_point came;
    uint64_t records = 0;  // 0: none yet
    double sent_per_s = 0;
    double received_per_s = 0;
    double finished_per_s = 0;
    double busy = 0;             // seconds in a second
    std::vector<NicRates> nics;  // as in the record
    bool unreadable = false;
  };
  struct Problem {
    int64_t unix_ms = 0;
    std::string who;
    std::string text;
  };
  // One node, with all that is known of it.
  struct Row {
    ps::JobView::Peer peer;
    std::string role;
    int rank = 0;
    Entry entry;
  };
  struct Slowest {
    int rank = -1;       // none
    double last_in = 0;  // part of the sums
    double mean_wait_s = 0;
  };
  struct Snapshot {
    std::string address;
    ps::JobView view;
    std::vector<Row> rows;          // servers, then workers, by rank
    std::vector<Problem> problems;  // the newest first
    Slowest slowest;
    uint64_t uptime_s = 0;
    int Count(const char* role, bool left) const;
  };

  Snapshot Look();
  void NoteProblem(Problem problem) PS_REQUIRES(mu_);
  static Slowest FindSlowest(const std::vector<Row>& rows);
  static std::string NicsJson(const Entry& entry);
  // A row for each NIC; empty where every node uses one.
  static std::string NicsText(const std::vector<Row>& rows);

  const std::string version_;
  const double patience_s_;
  const Clock::time_point begin_ = Clock::now();
  ps::Mutex mu_;
  std::string address_ PS_GUARDED_BY(mu_);
  std::function<ps::JobView()> view_;
  ps::JobView last_view_ PS_GUARDED_BY(mu_);
  std::map<int, Entry> entries_ PS_GUARDED_BY(mu_);  // by node id
  std::deque<Problem> problems_ PS_GUARDED_BY(mu_);  // the newest first
  uint64_t own_problems_ PS_GUARDED_BY(mu_) = 0;
};

// The scheduler's web page: who is in the job, and what they do.

// Answers GET / (a page), /status (JSON) and /status.txt (a table) until it is destroyed, which
// waits for the requests in progress.  Nothing can be changed through it.
class StatusServer {
 public:
  // Listens at BYTEPS_STATUS_PORT of BYTEPS_HTTP_HOST.  None when the port is 0.  Throws
  // UsageError when it cannot listen there.  `board` outlives it.
  static std::unique_ptr<StatusServer> Make(const Config& config, StatusBoard* board);
  ~StatusServer();
  StatusServer(const StatusServer&) = delete;
  StatusServer& operator=(const StatusServer&) = delete;

 private:
  explicit StatusServer(std::unique_ptr<HttpServer> server);

  std::unique_ptr<HttpServer> server_;
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_OBSERVE_STATUS_H_
