#include "byteps/observe/metrics.h"

#include <cstdio>
#include <sstream>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/net/link/counters.h"
#include "byteps/net/link/link_outage.h"
#include "byteps/net/link/name_service.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/link/registration_cache.h"
#include "byteps/observe/counter.h"
#include "byteps/observe/histogram.h"
#include "byteps/observe/http_server.h"
#include "byteps/observe/metrics_server.h"

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

Metric Reconnections(const char* name) {
  return Counted(name, "Connections that broke and were made again.",
                 static_cast<double>(ps::Reconnections()));
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
      Counted("byteps_worker_busy_seconds_total", "Time with at least one operation in flight.",
              static_cast<double>(c.busy_ns.Get()) * 1e-9),
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
      Reconnections("byteps_worker_reconnections_total"),
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
      Reconnections("byteps_server_reconnections_total"),
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

namespace {

using Labels = std::vector<std::pair<std::string, std::string>>;

std::string Number(double value) {
  char text[32];
  snprintf(text, sizeof(text), "%.17g", value);
  return text;
}

std::string Bound(double value) {
  char text[32];
  snprintf(text, sizeof(text), "%.10g", value);
  return text;
}

std::string Escaped(const std::string& text, bool quotes) {
  std::string out;
  for (const char c : text) {
    if (c == '\\') {
      out += "\\\\";
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '"' && quotes) {
      out += "\\\"";
    } else {
      out += c;
    }
  }
  return out;
}

void Sample(const std::string& name, const Labels& labels, const std::string& value,
            std::string* out) {
  *out += name;
  char separator = '{';
  for (const auto& [key, text] : labels) {
    *out += separator + key + "=\"" + Escaped(text, true) + "\"";
    separator = ',';
  }
  *out += "} " + value + "\n";
}

void Samples(const Metric& metric, const Labels& labels, std::string* out) {
  if (metric.kind != Metric::kHistogram) {
    return Sample(metric.name, labels, Number(metric.value), out);
  }
  const Histogram::Reading& reading = metric.histogram;
  Sample(metric.name + "_count", labels, std::to_string(reading.count), out);
  Sample(metric.name + "_sum", labels, Number(reading.sum), out);
  Labels bucket = labels;
  bucket.emplace_back("le", "");
  for (size_t i = 0; i < reading.cumulative.size(); ++i) {
    bucket.back().second = Bound(Histogram::kBounds[i]);
    Sample(metric.name + "_bucket", bucket, std::to_string(reading.cumulative[i]), out);
  }
  bucket.back().second = "+Inf";
  Sample(metric.name + "_bucket", bucket, std::to_string(reading.count), out);
}

const char* TypeOf(Metric::Kind kind) {
  if (kind == Metric::kCounter) return "counter";
  return kind == Metric::kGauge ? "gauge" : "histogram";
}

// Returns the address at which other nodes reach this process. Returns "" if there is none:
// starting the transport then fails with a better error. Throws UnknownHost.
std::string OwnHost(const Config& config) try {
  if (const std::string& host = config.String("DMLC_NODE_HOST"); !host.empty()) return host;
  if (const std::string& name = config.String("DMLC_INTERFACE"); !name.empty()) {
    return ps::AddressOfInterface(name);
  }
  const std::string& scheduler = config.String("DMLC_PS_ROOT_URI");
  if (scheduler.empty()) return "";
  return ps::LocalAddressTowards(scheduler, static_cast<int>(config.Int("DMLC_PS_ROOT_PORT")));
} catch (const ps::UnknownHost&) {
  throw;
} catch (const Error&) {
  return "";
}

}  // namespace

std::string MetricsText(const MetricsSource& source) {
  const int rank = source.rank();
  const Labels process = {{"role", NameOf(source.role)},
                          {"rank", rank < 0 ? "" : std::to_string(rank)}};
  std::vector<Metric> metrics = source.metrics();
  for (const auto& more : {Tell(ps::ReadNicCounters()), Tell(ps::ReadEndpointCounters())}) {
    metrics.insert(metrics.end(), more.begin(), more.end());
  }
  std::string out, last;
  for (const Metric& metric : metrics) {
    if (metric.name != last) {
      out += "# HELP " + metric.name + " " + Escaped(metric.help, false) + "\n# TYPE " +
             metric.name + " " + TypeOf(metric.kind) + "\n";
      last = metric.name;
    }
    Labels labels = process;
    labels.insert(labels.end(), metric.labels.begin(), metric.labels.end());
    Samples(metric, labels, &out);
  }
  return out;
}

std::unique_ptr<MetricsServer> MetricsServer::Make(const Config& config, int local_rank,
                                                   MetricsSource source) {
  const long first = config.Int("BYTEPS_METRICS_PORT");
  if (first == 0) return nullptr;
  const long port = first + local_rank;
  const std::string text = "BYTEPS_METRICS_PORT=" + std::to_string(first) +
                           ": cannot serve metrics at port " + std::to_string(port) +
                           " (the port plus the local rank " + std::to_string(local_rank) + ")";
  if (port > 65535) throw UsageError(text + ": the greatest port is 65535");
  const auto answer = [source = std::move(source)](const std::string& path) {
    HttpAnswer answer;
    answer.type = "text/plain; version=0.0.4; charset=utf-8";
    if (path == "/metrics") {
      answer.body = MetricsText(source);
    } else {
      answer.status = 404;
      answer.body = "there is /metrics\n";
    }
    return answer;
  };
  const std::string& host = config.String("BYTEPS_HTTP_HOST");
  const auto make = [&] {
    std::vector<std::string> hosts = {host};
    std::vector<std::string> optional;
    if (host.empty()) {
      const std::string own = OwnHost(config);
      hosts = {own.empty() ? ps::LoopbackAddress() : own};
      optional = {ps::LoopbackAddress()};
    }
    return std::unique_ptr<MetricsServer>(new MetricsServer(
        std::make_unique<HttpServer>("metrics", hosts, optional, static_cast<int>(port), answer)));
  };
  try {
    return ps::AwaitHost(config.Float("BYTEPS_START_TIMEOUT_S"), make);
  } catch (const Error& e) {
    throw UsageError(text + ": " + e.what() +
                     "; is it taken, or BYTEPS_HTTP_HOST no address of this host?");
  }
}

MetricsServer::MetricsServer(std::unique_ptr<HttpServer> server) : server_(std::move(server)) {}
MetricsServer::~MetricsServer() = default;

}  // namespace core
}  // namespace byteps
