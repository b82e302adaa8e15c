#ifndef BYTEPS_OBSERVE_STATUS_BOARD_H_
#define BYTEPS_OBSERVE_STATUS_BOARD_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/net/membership/event.h"
#include "byteps/observe/status_record.h"

namespace byteps {
namespace core {

// Scheduler's status of the cluster, as JSON and as text.
//
// It keeps each node's latest record, and rates computed from the last two records. Thread-safe.
class StatusBoard {
 public:
  // A node counts as silent after `patience_s` seconds without a message.
  StatusBoard(std::string version, double patience_s)
      : version_(std::move(version)), patience_s_(patience_s) {}

  // Sets the address at which the scheduler listens. `view` returns the state of its job.
  void Attach(const std::string& host, int port, std::function<ps::JobView()> view);
  // Stops calling `view`. The last state remains available.
  void Detach();

  // Takes a node's packed StatusRecord. An unreadable one counts as a problem of the node.
  void OnReport(int node_id, const std::string& report);

  // Forgets the job's nodes, because they are gone, and others will come.
  void OnGeneration();

  // Returns an object with the members that docs/use/observability.md lists.
  std::string Json();
  // Returns a table for a terminal.
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
    double busy = 0;             // seconds per second
    std::vector<NicRates> nics;  // in the record's order
    bool unreadable = false;
  };
  struct Problem {
    int64_t unix_ms = 0;
    std::string who;
    std::string text;
  };
  // A node, with everything known of it.
  struct Row {
    ps::JobView::Peer peer;
    std::string role;
    int rank = 0;
    Entry entry;
  };
  struct Slowest {
    int rank = -1;       // none
    double last_in = 0;  // fraction of the sums
    double mean_wait_s = 0;
  };
  struct Snapshot {
    std::string address;
    ps::JobView view;
    std::vector<Row> rows;          // servers, then workers, by rank
    std::vector<Problem> problems;  // newest first
    Slowest slowest;
    uint64_t uptime_s = 0;
    int Count(const char* role, bool left) const;
  };

  Snapshot Look();
  void NoteProblem(Problem problem) PS_REQUIRES(mu_);
  static Slowest FindSlowest(const std::vector<Row>& rows);
  static std::string NicsJson(const Entry& entry);
  // Returns a row for each NIC; "" if every node uses only one.
  static std::string NicsText(const std::vector<Row>& rows);

  const std::string version_;
  const double patience_s_;
  const Clock::time_point begin_ = Clock::now();
  ps::Mutex mu_;
  std::string address_ PS_GUARDED_BY(mu_);
  std::function<ps::JobView()> view_;
  ps::JobView last_view_ PS_GUARDED_BY(mu_);
  std::map<int, Entry> entries_ PS_GUARDED_BY(mu_);  // by node id
  std::deque<Problem> problems_ PS_GUARDED_BY(mu_);  // newest first
  uint64_t own_problems_ PS_GUARDED_BY(mu_) = 0;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_OBSERVE_STATUS_BOARD_H_
