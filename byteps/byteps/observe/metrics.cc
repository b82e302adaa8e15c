#include "byteps/observe/metrics.h"

#include <algorithm>
#include <sstream>

#include "byteps/base/invariant.h"
#include "byteps/net/link/registration_cache.h"

namespace byteps {
namespace core {
namespace {

Metric Counted(const char* name, const char* help, double value) {
  return {name, Metric::kCounter, help, value, {}};
}

Metric Counted(const char* name, const char* help, const Counter& counter) {
  return Counted(name, help, static_cast<double>(counter.Get()));
}

Metric Now(const char* name, const char* help, uint64_t value) {
  return {name, Metric::kGauge, help, static_cast<double>(value), {}};
}

Metric Spread(const char* name, const char* help, const Histogram& histogram) {
  return {name, Metric::kHistogram, help, 0, histogram.Read()};
}

Metric BrokenInvariants(const char* name) {
  return Counted(name,
                 "Invariants that this process found broken, which is a fault of byteps: the log "
                 "names them.",
                 static_cast<double>(ps::NumBrokenInvariants()));
}

void PrintRows(std::ostringstream* out, const std::vector<Metric>& metrics) {
  static const char* const kKinds[] = {"counter", "gauge", "histogram"};
  for (const auto& metric : metrics) {
    std::string labels;
    for (const auto& label : metric.labels) {
      labels += (labels.empty() ? "`" : ", `") + label.first + "`";
    }
    *out << "| `" << metric.name << "` | " << kKinds[metric.kind] << " | " << labels << " | "
         << metric.help << " |\n";
  }
}

}  // namespace

void Histogram::Observe(int64_t nanoseconds) {
  const double seconds = static_cast<double>(nanoseconds) * 1e-9;
  const auto bound = std::lower_bound(kBounds.begin(), kBounds.end(), seconds);
  buckets_[bound - kBounds.begin()].Add();
  sum_.Add(nanoseconds);
}

Histogram::Reading Histogram::Read() const {
  Reading reading;
  for (const auto& bucket : buckets_) {
    reading.count += bucket.Get();
    reading.cumulative.push_back(reading.count);
  }
  reading.cumulative.pop_back();
  reading.sum = static_cast<double>(sum_.Get()) * 1e-9;
  return reading;
}

std::vector<Metric> Tell(const WorkerCounters& c, const WorkerGauges& g) {
  return {
      Counted("byteps_worker_pushed_bytes_total", "Bytes of partitions handed to the transport.",
              c.pushed_bytes),
      Counted("byteps_worker_pushed_partitions_total", "Partitions handed to the transport.",
              c.pushed_partitions),
      Counted("byteps_worker_pulled_bytes_total", "Bytes of sums that were answered.",
              c.pulled_bytes),
      Counted("byteps_worker_pulled_partitions_total",
              "Partitions that were answered with their sum, or the wanted part of it.",
              c.pulled_partitions),
      Counted("byteps_worker_placed_bytes_total",
              "Bytes of sums that were received straight into the tensor, or the pinned memory of "
              "one on a GPU.",
              c.placed_bytes),
      Counted("byteps_worker_copied_bytes_total",
              "Bytes of sums that were received elsewhere, and copied there by the CPU.",
              c.copied_bytes),
      Counted("byteps_worker_operations_total", "Operations (push_pull calls) that ended well.",
              c.operations),
      Counted("byteps_worker_failed_operations_total", "Operations that failed.",
              c.failed_operations),
      Counted("byteps_worker_failed_requests_total",
              "Requests, pushes or declarations, that a server refused or failed.",
              c.failed_requests),
      Now("byteps_worker_declared_tensors", "Names that this worker sums, declared to the servers.",
          g.declared_tensors),
      Now("byteps_worker_running_operations", "Operations that have neither ended nor failed.",
          g.running_operations),
      Now("byteps_worker_push_queue_partitions",
          "Partitions that wait for a push loop, or for room in their server's window "
          "(BYTEPS_SERVER_WINDOW_BYTES).",
          g.push_queue),
      Now("byteps_worker_transport_partitions",
          "Partitions that a push loop has taken and the transport has not sent yet: they are in "
          "their servers' windows.",
          g.in_transport),
      Now("byteps_worker_unanswered_requests", "Requests that no server has answered yet.",
          g.unanswered),
      Now("byteps_worker_pull_queue_partitions", "Sums that wait for a pull loop, to be copied.",
          g.pull_queue),
      Now("byteps_worker_kept_bytes",
          "Sums that are kept for a server that may be lost (BYTEPS_REPLACE_SERVERS_S).",
          g.kept_bytes),
      Now("byteps_worker_replicas_epoch", "Changes of the replicas that the scheduler has told of.",
          g.replicas_epoch),
      Now("byteps_worker_replicas_absent", "Replicas that sums are made without now.",
          g.replicas_absent),
      Spread("byteps_worker_partition_seconds",
             "From handing a partition to the transport to its answer.", c.partition_seconds),
      Spread("byteps_worker_operation_seconds",
             "From the call to the last sum of operations that ended well.", c.operation_seconds),
      Counted("byteps_worker_memory_registrations_total",
              "Times that memory was registered with an RDMA device.",
              static_cast<double>(ps::RegistrationCache::Registrations())),
      BrokenInvariants("byteps_worker_broken_invariants_total"),
  };
}

std::vector<Metric> Tell(const ServerCounters& c, const ServerGauges& g) {
  std::vector<Metric> metrics = {
      Counted("byteps_server_received_bytes_total", "Bytes of partitions that workers pushed.",
              c.received_bytes),
      Counted("byteps_server_received_partitions_total", "Partitions that workers pushed.",
              c.received_partitions),
      Counted("byteps_server_answered_bytes_total", "Bytes of sums sent to workers.",
              c.answered_bytes),
      Counted("byteps_server_answered_partitions_total",
              "Pushes that were answered with the sum, or the wanted part of it.",
              c.answered_partitions),
      Counted("byteps_server_sums_total",
              "Rounds of a partition that every member of its group pushed.", c.sums),
      Counted("byteps_server_failed_sums_total",
              "Rounds of a partition that failed: a member was lost, late or disagreed.",
              c.failed_sums),
      Counted("byteps_server_short_sums_total",
              "Rounds of a partition that were summed without a replica that was lost.",
              c.short_sums),
      Counted("byteps_server_refused_requests_total",
              "Requests that were refused: undeclared, malformed, or of workers that disagree.",
              c.refused_requests),
      Counted("byteps_server_adding_seconds_total", "Time spent adding, by all threads together.",
              static_cast<double>(c.adding_ns.Get()) * 1e-9),
      Now("byteps_server_declared_tensors", "Tensors that workers declared.",
          c.declared_tensors.Get()),
      Now("byteps_server_open_rounds",
          "Rounds of partitions that some members have pushed and others have not.", g.open_rounds),
      Counted("byteps_server_updated_partitions_total",
              "Partitions of parameters that the optimizer on the servers updated.",
              c.updated_partitions),
      Counted("byteps_server_tried_partitions_total",
              "Partitions whose parameters were sent before it was known whether the step stands.",
              c.tried_partitions),
      Counted(
          "byteps_server_redone_partitions_total",
          "Of these, partitions that were updated and sent again, since gradients were clipped.",
          c.redone_partitions),
      Now("byteps_server_state_bytes",
          "Memory promised to optimizer state (BYTEPS_SERVER_STATE_BYTES).", g.state_bytes),
      Now("byteps_server_has_copy",
          "1: another server has a copy of this one's optimizer state (BYTEPS_BACKUP_STATE).",
          g.has_copy),
      Spread("byteps_server_round_wait_seconds",
             "From the first push of a round to its last: how far apart the workers are.",
             c.round_wait_seconds),
      BrokenInvariants("byteps_server_broken_invariants_total"),
  };
  for (size_t i = 0; i < g.engine_queues.size(); ++i) {
    metrics.push_back(Now("byteps_server_engine_queue_tasks",
                          "Pushes and notices that wait for an engine thread.",
                          g.engine_queues[i]));
    metrics.back().labels = {{"engine", std::to_string(i)}};
  }
  return metrics;
}

std::vector<Metric> Tell(const std::vector<ps::EndpointReading>& endpoints) {
  using Reading = ps::EndpointReading;
  struct Row {
    const char* name;
    const char* help;
    uint64_t Reading::* value;
  };
  static const Row kRows[] = {
      {"byteps_rdma_sent_messages_total", "Messages sent by an RDMA endpoint.",
       &Reading::messages_sent},
      {"byteps_rdma_sent_bytes_total", "Bytes of these messages.", &Reading::bytes_sent},
      {"byteps_rdma_received_messages_total", "Messages received by an RDMA endpoint.",
       &Reading::messages_received},
      {"byteps_rdma_received_bytes_total", "Bytes of these messages.", &Reading::bytes_received},
      {"byteps_rdma_in_place_bytes_total",
       "Bytes of received values that the device wrote where they belong.",
       &Reading::bytes_in_place},
      {"byteps_rdma_in_pool_bytes_total",
       "Bytes of received values that it wrote into the transport's memory: a worker copies them, "
       "a server adds from there.",
       &Reading::bytes_in_pool},
      {"byteps_rdma_in_frames_bytes_total",
       "Bytes of received values so small that they came in their message's frame.",
       &Reading::bytes_in_frames},
  };
  std::vector<Metric> metrics;
  for (const Row& row : kRows) {
    for (const Reading& endpoint : endpoints) {
      metrics.push_back(Counted(row.name, row.help, static_cast<double>(endpoint.*row.value)));
      metrics.back().labels = {{"peer", endpoint.peer},
                               {"plane", endpoint.plane},
                               {"index", std::to_string(endpoint.index)}};
    }
  }
  return metrics;
}

std::vector<Metric> Tell(const std::vector<ps::NicReading>& nics) {
  struct Row {
    const char* name;
    const char* help;
    uint64_t ps::NicReading::* value;
  };
  static const Row kRows[] = {
      {"byteps_nic_sent_bytes_total",
       "Bytes sent over a NIC by TCP: messages with their values, before encryption. The NIC `lo` "
       "is what goes to processes of the same host.",
       &ps::NicReading::bytes_sent},
      {"byteps_nic_received_bytes_total", "Bytes received over a NIC by TCP.",
       &ps::NicReading::bytes_received},
  };
  std::vector<Metric> metrics;
  for (const Row& row : kRows) {
    for (const ps::NicReading& nic : nics) {
      metrics.push_back(Counted(row.name, row.help, static_cast<double>(nic.*row.value)));
      metrics.back().labels = {{"nic", nic.nic}};
    }
  }
  return metrics;
}

std::string MetricsMarkdown() {
  std::ostringstream out;
  out << "| metric | type | labels besides `role`, `rank` | meaning |\n|---|---|---|---|\n";
  PrintRows(&out, Tell(WorkerCounters(), WorkerGauges()));
  ServerGauges one_engine;
  one_engine.engine_queues = {0};
  PrintRows(&out, Tell(ServerCounters(), one_engine));
  PrintRows(&out, Tell(std::vector<ps::NicReading>(1)));
  PrintRows(&out, Tell(std::vector<ps::EndpointReading>(1)));
  return out.str();
}

}  // namespace core
}  // namespace byteps
