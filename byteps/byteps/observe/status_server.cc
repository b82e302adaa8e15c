#include "byteps/observe/status_server.h"

#include <string>
#include <utility>

#include "byteps/base/error.h"
#include "byteps/observe/http_server.h"
#include "byteps/observe/status_page.h"

namespace byteps {
namespace core {
namespace {

// What a browser may do with the page: show it, run its own script, and ask here again.
constexpr char kHeaders[] =
    "Cache-Control: no-store\r\n"
    "Content-Security-Policy: default-src 'self'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'\r\n";

HttpAnswer AnswerAt(const std::string& path, StatusBoard* board) {
  HttpAnswer answer;
  answer.headers = kHeaders;
  if (path == "/") {
    answer.type = "text/html; charset=utf-8";
    answer.body = kStatusPage;
  } else if (path == "/status") {
    answer.type = "application/json";
    answer.body = board->Json();
  } else if (path == "/status.txt") {
    answer.body = board->Text();
  } else {
    answer.status = 404;
    answer.body = "there are /, /status and /status.txt\n";
  }
  return answer;
}

}  // namespace

std::unique_ptr<StatusServer> StatusServer::Make(const Config& config, StatusBoard* board) {
  const long port = config.Int("BYTEPS_STATUS_PORT");
  if (port == 0) return nullptr;
  const std::string& host = config.String("BYTEPS_STATUS_HOST");
  try {
    return std::unique_ptr<StatusServer>(new StatusServer(std::make_unique<HttpServer>(
        "status", std::vector<std::string>{host.empty() ? "127.0.0.1" : host},
        std::vector<std::string>{}, static_cast<int>(port),
        [board](const std::string& path) { return AnswerAt(path, board); })));
  } catch (const Error& e) {
    throw UsageError("BYTEPS_STATUS_PORT=" + std::to_string(port) + ": cannot listen at " +
                     e.what() +
                     "; is the port taken, or BYTEPS_STATUS_HOST no address of this "
                     "host?");
  }
}

StatusServer::StatusServer(std::unique_ptr<HttpServer> server) : server_(std::move(server)) {}
StatusServer::~StatusServer() = default;

}  // namespace core
}  // namespace byteps
