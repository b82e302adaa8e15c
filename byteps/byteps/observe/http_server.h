// HTTP/1.1 server that answers GET requests of unauthenticated clients, for metrics and the
// scheduler's page.
//
// It has a single thread. A connection has one small request and little time. Only a few may be
// open: at the limit, the address with the most connections loses its oldest one (tcp/greeter.h).
// So neither half a request nor a flood delays a scrape.
#ifndef BYTEPS_OBSERVE_HTTP_SERVER_H_
#define BYTEPS_OBSERVE_HTTP_SERVER_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace byteps {
namespace core {

struct HttpAnswer {
  int status = 200;
  std::string type = "text/plain; charset=utf-8";
  std::string body;
  std::string headers;  // additional headers, each with its "\r\n"
};

class HttpServer {
 public:
  // Returns the answer for a path, such as "/metrics". Called by the server's thread.
  using Handler = std::function<HttpAnswer(const std::string& path)>;

  // Listens at `port` of each name or address in `hosts`. Those in `optional` may fail. Throws
  // Error with address and reason. `name`: name of the thread.
  HttpServer(const std::string& name, const std::vector<std::string>& hosts,
             const std::vector<std::string>& optional, int port, Handler handler);
  // Waits until a running call of the handler has ended.
  ~HttpServer();
  // Returns the port at the first address. If 0 was requested, the kernel has chosen it.
  int port() const;
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Limit of a request, in bytes.
constexpr size_t kMostHttpRequestBytes = 8192;
// Returns the answer to the received bytes; "" while the request is incomplete.
std::string ReplyTo(const std::string& request, const HttpServer::Handler& handler);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_OBSERVE_HTTP_SERVER_H_
