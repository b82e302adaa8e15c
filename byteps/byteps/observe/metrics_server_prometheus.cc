#include <prometheus/collectable.h>
#include <prometheus/exposer.h>
#include <prometheus/metric_family.h>

#include <limits>
#include <utility>

#include "byteps/base/error.h"
#include "byteps/observe/metrics_server.h"

namespace byteps {
namespace core {
namespace {

prometheus::MetricType TypeOf(Metric::Kind kind) {
  if (kind == Metric::kCounter) return prometheus::MetricType::Counter;
  return kind == Metric::kGauge ? prometheus::MetricType::Gauge : prometheus::MetricType::Histogram;
}

prometheus::ClientMetric Convert(const Metric& metric) {
  prometheus::ClientMetric out;
  out.counter.value = metric.value;
  out.gauge.value = metric.value;
  if (metric.kind != Metric::kHistogram) return out;
  const Histogram::Reading& reading = metric.histogram;
  out.histogram.sample_count = reading.count;
  out.histogram.sample_sum = reading.sum;
  for (size_t i = 0; i < reading.cumulative.size(); ++i) {
    out.histogram.bucket.push_back({reading.cumulative[i], Histogram::kBounds[i]});
  }
  out.histogram.bucket.push_back({reading.count, std::numeric_limits<double>::infinity()});
  return out;
}

class Collector : public prometheus::Collectable {
 public:
  explicit Collector(MetricsSource source) : source_(std::move(source)) {}

  std::vector<prometheus::MetricFamily> Collect() const override {
    const int rank = source_.rank();
    const std::string rank_text = rank < 0 ? "" : std::to_string(rank);
    std::vector<prometheus::MetricFamily> families;
    std::vector<Metric> metrics = source_.metrics();
    const std::vector<Metric> endpoints = Tell(ps::ReadEndpointCounters());
    metrics.insert(metrics.end(), endpoints.begin(), endpoints.end());
    for (const Metric& metric : metrics) {
      if (families.empty() || families.back().name != metric.name) {
        families.push_back({metric.name, metric.help, TypeOf(metric.kind), {}});
      }
      prometheus::ClientMetric sample = Convert(metric);
      sample.label = {{"role", NameOf(source_.role)}, {"rank", rank_text}};
      for (const auto& label : metric.labels) sample.label.push_back({label.first, label.second});
      families.back().metric.push_back(std::move(sample));
    }
    return families;
  }

 private:
  const MetricsSource source_;
};

}  // namespace

class MetricsServer::Impl {
 public:
  Impl(const std::string& address, MetricsSource source)
      : collector_(std::make_shared<Collector>(std::move(source))), exposer_(address, 1) {
    exposer_.RegisterCollectable(collector_);
  }

 private:
  std::shared_ptr<Collector> collector_;  // outlives the exposer, which asks it
  prometheus::Exposer exposer_;
};

bool BuiltWithPrometheus() { return true; }

std::unique_ptr<MetricsServer> MetricsServer::Make(const Config& config, int local_rank,
                                                   MetricsSource source) {
  const long first = config.Int("BYTEPS_METRICS_PORT");
  if (first == 0) return nullptr;
  const long port = first + local_rank;
  const std::string text = "BYTEPS_METRICS_PORT=" + std::to_string(first) +
                           ": cannot serve metrics at port " + std::to_string(port) +
                           " (the port plus the local rank " + std::to_string(local_rank) + ")";
  if (port > 65535) throw UsageError(text + ": the greatest port is 65535");
  const std::string& host = config.String("BYTEPS_METRICS_HOST");
  const std::string address = (host.empty() ? "" : host + ":") + std::to_string(port);
  try {
    return std::unique_ptr<MetricsServer>(
        new MetricsServer(std::make_unique<Impl>(address, std::move(source))));
  } catch (const std::exception& e) {
    throw UsageError(text + (host.empty() ? "" : " of " + host) +
                     "; is it taken, or BYTEPS_METRICS_HOST no address of this host? (" + e.what() +
                     ")");
  }
}

MetricsServer::MetricsServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MetricsServer::~MetricsServer() = default;

}  // namespace core
}  // namespace byteps
