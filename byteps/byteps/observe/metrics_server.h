#ifndef BYTEPS_OBSERVE_METRICS_SERVER_H_
#define BYTEPS_OBSERVE_METRICS_SERVER_H_

#include <memory>

#include "byteps/base/config.h"
#include "byteps/observe/http_server.h"
#include "byteps/observe/metrics.h"

namespace byteps {
namespace core {

// Answers GET /metrics until it is destroyed. Destruction waits for running requests.
class MetricsServer {
 public:
  // Listens at BYTEPS_METRICS_PORT plus `local_rank`, so that each process of a host has a port.
  // The address is BYTEPS_HTTP_HOST, by default loopback and the address at which other nodes reach
  // this process. Returns null if the port is 0. Throws UsageError if it cannot listen.
  static std::unique_ptr<MetricsServer> Make(const Config& config, int local_rank,
                                             MetricsSource source);
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

 private:
  explicit MetricsServer(std::unique_ptr<HttpServer> server);

  std::unique_ptr<HttpServer> server_;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_OBSERVE_METRICS_SERVER_H_
