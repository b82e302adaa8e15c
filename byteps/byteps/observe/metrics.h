// Counters of workers and servers, and their metrics for Prometheus.
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
  Counter busy_ns;  // with an operation in flight
  Histogram partition_seconds;
  Histogram operation_seconds;
};

// Current amounts.
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

// A metric with its current value.
struct Metric {
  enum Kind { kCounter, kGauge, kHistogram };
  std::string name;
  Kind kind;
  std::string help;
  double value = 0;              // value of a counter or gauge
  Histogram::Reading histogram;  // reading of a histogram
  // Part of the process that the metric is about: an engine thread, an endpoint, a NIC.
  std::vector<std::pair<std::string, std::string>> labels = {};
};

// Converts counters to metrics. Metrics of the same name are adjacent.
std::vector<Metric> Tell(const WorkerCounters& counters, const WorkerGauges& gauges);
std::vector<Metric> Tell(const ServerCounters& counters, const ServerGauges& gauges);

// Converts the traffic of each endpoint, for transports with endpoints.
std::vector<Metric> Tell(const std::vector<ps::EndpointReading>& endpoints);

// Converts the traffic of each NIC.
std::vector<Metric> Tell(const std::vector<ps::NicReading>& nics);

// Returns the table of all metrics, in Markdown.
std::string MetricsMarkdown();

// Source of metrics. The metrics server's thread may call both functions at any time.
struct MetricsSource {
  Role role = Role::kWorker;
  std::function<int()> rank;  // negative: not known yet
  std::function<std::vector<Metric>()> metrics;
};

// Returns the metrics in Prometheus's text format.
std::string MetricsText(const MetricsSource& source);

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_OBSERVE_METRICS_H_
