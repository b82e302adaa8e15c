// What a worker and a server count, the names under which they tell it, and their server for
// Prometheus.
#ifndef BYTEPS_OBSERVE_METRICS_H_
#define BYTEPS_OBSERVE_METRICS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/net/link/counters.h"
#include "byteps/observe/counter.h"
#include "byteps/observe/histogram.h"

namespace byteps {
namespace core {

struct WorkerCounters {
  Counter pushed_bytes;
  Counter pushed_partitions;
  Counter pulled_bytes;
  Counter pulled_partitions;
  Counter placed_bytes;
  Counter copied_bytes;
  Counter operations;
  Counter failed_operations;
  Counter failed_requests;
  Histogram partition_seconds;
  Histogram operation_seconds;
};

// How much there is now.
struct WorkerGauges {
  uint64_t declared_tensors = 0;
  uint64_t running_operations = 0;
  uint64_t push_queue = 0;
  uint64_t in_transport = 0;
  uint64_t unanswered = 0;
  uint64_t pull_queue = 0;
  uint64_t kept_bytes = 0;
  uint64_t replicas_epoch = 0;
  uint64_t replicas_absent = 0;
};

struct ServerCounters {
  Counter received_bytes;
  Counter received_partitions;
  Counter answered_bytes;
  Counter answered_partitions;
  Counter sums;
  Counter failed_sums;
  Counter short_sums;
  Counter refused_requests;
  Counter adding_ns;
  Counter declared_tensors;
  Counter updated_partitions;
  Counter tried_partitions;
  Counter redone_partitions;
  Histogram round_wait_seconds;
};

struct ServerGauges {
  uint64_t open_rounds = 0;
  uint64_t state_bytes = 0;
  uint64_t has_copy = 0;
  std::vector<uint64_t> engine_queues;  // tasks, by engine thread
};

// One metric with its value now.
struct Metric {
  enum Kind { kCounter, kGauge, kHistogram };
  std::string name;
  Kind kind;
  std::string help;
  double value = 0;              // of a counter or gauge
  Histogram::Reading histogram;  // of a histogram
  // What part of the process it is about: an engine thread, an endpoint, a NIC.
  std::vector<std::pair<std::string, std::string>> labels = {};
};

// Metrics of one name follow each other.
std::vector<Metric> Tell(const WorkerCounters& counters, const WorkerGauges& gauges);
std::vector<Metric> Tell(const ServerCounters& counters, const ServerGauges& gauges);

// What went by each endpoint of a transport that has some.
std::vector<Metric> Tell(const std::vector<ps::EndpointReading>& endpoints);

// What went over each NIC.
std::vector<Metric> Tell(const std::vector<ps::NicReading>& nics);

// The table of all metrics, as Markdown.
std::string MetricsMarkdown();

// Metrics for Prometheus, over HTTP.

// What is served.  Both functions are called by the server's thread, at any time.
struct MetricsSource {
  Role role = Role::kWorker;
  std::function<int()> rank;  // less than 0: not known yet
  std::function<std::vector<Metric>()> metrics;
};

// What Prometheus gets, in its text format.
std::string MetricsText(const MetricsSource& source);

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_OBSERVE_METRICS_H_
