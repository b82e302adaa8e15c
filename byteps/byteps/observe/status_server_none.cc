// Builds without civetweb.
#include "byteps/base/error.h"
#include "byteps/observe/status_server.h"

namespace byteps {
namespace core {

class StatusServer::Impl {};

std::unique_ptr<StatusServer> StatusServer::Make(const Config& config, StatusBoard* /*board*/) {
  const long port = config.Int("BYTEPS_STATUS_PORT");
  if (port == 0) return nullptr;
  throw UsageError("BYTEPS_STATUS_PORT=" + std::to_string(port) +
                   " cannot be used: this byteps was built without civetweb; install "
                   "prometheus-cpp-dev (Debian, Ubuntu), which brings it, and build again, or "
                   "unset the variable");
}

StatusServer::StatusServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
StatusServer::~StatusServer() = default;

}  // namespace core
}  // namespace byteps
