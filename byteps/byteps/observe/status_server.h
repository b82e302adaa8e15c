#ifndef BYTEPS_OBSERVE_STATUS_SERVER_H_
#define BYTEPS_OBSERVE_STATUS_SERVER_H_

#include <memory>

#include "byteps/base/config.h"
#include "byteps/observe/http_server.h"
#include "byteps/observe/status_board.h"

namespace byteps {
namespace core {

// Scheduler's web page: the nodes in the job, and their activity.
//
// Answers GET / (a page), /status (JSON) and /status.txt (a table) until it is destroyed.
// Destruction waits for running requests. It is read-only.
class StatusServer {
 public:
  // Listens at BYTEPS_STATUS_PORT of BYTEPS_HTTP_HOST. Returns null if the port is 0. Throws
  // UsageError if it cannot listen. `board` must outlive the server.
  static std::unique_ptr<StatusServer> Make(const Config& config, StatusBoard* board);
  ~StatusServer();
  StatusServer(const StatusServer&) = delete;
  StatusServer& operator=(const StatusServer&) = delete;

 private:
  explicit StatusServer(std::unique_ptr<HttpServer> server);

  std::unique_ptr<HttpServer> server_;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_OBSERVE_STATUS_SERVER_H_
