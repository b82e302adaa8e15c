#include <civetweb.h>

#include <cstring>
#include <string>
#include <utility>

#include "byteps/base/error.h"
#include "byteps/observe/status_page.h"
#include "byteps/observe/status_server.h"

namespace byteps {
namespace core {
namespace {

// What a browser may do with the page: show it, run its own script, and ask here again.
constexpr char kHead[] =
    "HTTP/1.1 200 OK\r\n"
    "Content-Type: %s\r\n"
    "Content-Length: %zu\r\n"
    "Cache-Control: no-store\r\n"
    "X-Content-Type-Options: nosniff\r\n"
    "Content-Security-Policy: default-src 'self'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'\r\n"
    "Connection: close\r\n\r\n";

int Answer(mg_connection* connection, const char* type, const std::string& body) {
  // By hand: older releases of the library cannot make a head.
  mg_printf(connection, kHead, type, body.size());
  mg_write(connection, body.data(), body.size());
  return 200;
}

int OnRequest(mg_connection* connection, void* data) {
  StatusBoard* const board = static_cast<StatusBoard*>(data);
  const mg_request_info* request = mg_get_request_info(connection);
  if (strcmp(request->request_method, "GET") != 0) {
    return mg_send_http_error(connection, 405, "only GET is served here");
  }
  const std::string path = request->local_uri != nullptr ? request->local_uri : "";
  if (path == "/") return Answer(connection, "text/html; charset=utf-8", kStatusPage);
  if (path == "/status") return Answer(connection, "application/json", board->Json());
  if (path == "/status.txt") {
    return Answer(connection, "text/plain; charset=utf-8", board->Text());
  }
  return mg_send_http_error(connection, 404, "there are /, /status and /status.txt");
}

}  // namespace

class StatusServer::Impl {
 public:
  explicit Impl(mg_context* context) : context_(context) {}
  ~Impl() { mg_stop(context_); }

 private:
  mg_context* const context_;
};

std::unique_ptr<StatusServer> StatusServer::Make(const Config& config, StatusBoard* board) {
  const long port = config.Int("BYTEPS_STATUS_PORT");
  if (port == 0) return nullptr;
  std::string host = config.String("BYTEPS_STATUS_HOST");
  if (host.find(':') != std::string::npos && host[0] != '[') host = "[" + host + "]";
  const std::string address = (host.empty() ? "127.0.0.1" : host) + ":" + std::to_string(port);
  const char* options[] = {"listening_ports",    address.c_str(), "num_threads", "2",
                           "request_timeout_ms", "5000",          nullptr};
  mg_callbacks callbacks;
  memset(&callbacks, 0, sizeof(callbacks));
  callbacks.log_message = [](const mg_connection*, const char*) { return 1; };
  mg_context* const context = mg_start(&callbacks, nullptr, options);
  if (context == nullptr) {
    throw UsageError("BYTEPS_STATUS_PORT=" + std::to_string(port) + ": cannot listen at " +
                     address +
                     "; is the port taken, or BYTEPS_STATUS_HOST no address of this "
                     "host?");
  }
  auto impl = std::make_unique<Impl>(context);
  mg_set_request_handler(context, "/", OnRequest, board);
  return std::unique_ptr<StatusServer>(new StatusServer(std::move(impl)));
}

StatusServer::StatusServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
StatusServer::~StatusServer() = default;

}  // namespace core
}  // namespace byteps
