#ifndef BYTEPS_OBSERVE_METRICS_SERVER_H_
#define BYTEPS_OBSERVE_METRICS_SERVER_H_

#include <memory>

#include "byteps/base/config.h"
#include "byteps/observe/http_server.h"
#include "byteps/observe/metrics.h"

namespace byteps {
namespace core {

// Answers GET /metrics until it is destroyed, which waits for the requests in progress.
class MetricsServer {
 public:
  // Listens at BYTEPS_METRICS_PORT plus `local_rank`, which keeps the processes of one
  // host apart, of BYTEPS_HTTP_HOST: by default of the address at which the other nodes
  // reach this process, and of loopback.  None when the port is 0.  Throws UsageError when
  // it cannot listen there.
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
