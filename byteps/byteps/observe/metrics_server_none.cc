// Builds without prometheus-cpp.
#include "byteps/base/error.h"
#include "byteps/observe/metrics_server.h"

namespace byteps {
namespace core {

class MetricsServer::Impl {};

bool BuiltWithPrometheus() { return false; }

std::unique_ptr<MetricsServer> MetricsServer::Make(const Config& config, int /*local_rank*/,
                                                   MetricsSource /*source*/) {
  const long port = config.Int("BYTEPS_METRICS_PORT");
  if (port == 0) return nullptr;
  throw UsageError("BYTEPS_METRICS_PORT=" + std::to_string(port) +
                   " cannot be used: this byteps was built without prometheus-cpp; install "
                   "prometheus-cpp-dev (Debian, Ubuntu) and build again, or unset it");
}

MetricsServer::MetricsServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MetricsServer::~MetricsServer() = default;

}  // namespace core
}  // namespace byteps
