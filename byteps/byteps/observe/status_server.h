#ifndef BYTEPS_OBSERVE_STATUS_SERVER_H_
#define BYTEPS_OBSERVE_STATUS_SERVER_H_

#include <memory>

#include "byteps/base/config.h"
#include "byteps/observe/http_server.h"
#include "byteps/observe/status_board.h"

namespace byteps {
namespace core {

// The scheduler's web page: who is in the job, and what they do.
//
// Answers GET / (a page), /status (JSON) and /status.txt (a table) until it is destroyed, which
// waits for the requests in progress.  Nothing can be changed through it.
class StatusServer {
 public:
  // Listens at BYTEPS_STATUS_PORT of BYTEPS_HTTP_HOST.  None when the port is 0.  Throws
  // UsageError when it cannot listen there.  `board` outlives it.
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
