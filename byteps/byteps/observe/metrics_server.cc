#include "byteps/observe/metrics_server.h"

#include <cstdio>
#include <utility>

#include "byteps/base/error.h"
#include "byteps/net/link/endpoint_counters.h"
#include "byteps/net/link/net_address.h"
#include "byteps/observe/http_server.h"

namespace byteps {
namespace core {
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

// Where the other nodes reach this process.  Empty: it is not known, which ends the start of the
// transport with a better error than this one could.
std::string OwnHost(const Config& config) try {
  if (const std::string& host = config.String("DMLC_NODE_HOST"); !host.empty()) return host;
  if (const std::string& name = config.String("DMLC_INTERFACE"); !name.empty()) {
    return ps::AddressOfInterface(name);
  }
  const std::string& scheduler = config.String("DMLC_PS_ROOT_URI");
  if (scheduler.empty()) return "";
  return ps::LocalAddressTowards(scheduler, static_cast<int>(config.Int("DMLC_PS_ROOT_PORT")));
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
  const std::string& host = config.String("BYTEPS_METRICS_HOST");
  try {
    std::vector<std::string> hosts = {host};
    std::vector<std::string> optional;
    if (host.empty()) {
      const std::string own = OwnHost(config);
      hosts = {own.empty() ? "127.0.0.1" : own};
      optional = {"127.0.0.1"};
    }
    return std::unique_ptr<MetricsServer>(new MetricsServer(
        std::make_unique<HttpServer>("metrics", hosts, optional, static_cast<int>(port), answer)));
  } catch (const Error& e) {
    throw UsageError(text + ": " + e.what() +
                     "; is it taken, or BYTEPS_METRICS_HOST no address of this host?");
  }
}

MetricsServer::MetricsServer(std::unique_ptr<HttpServer> server) : server_(std::move(server)) {}
MetricsServer::~MetricsServer() = default;

}  // namespace core
}  // namespace byteps
