// Answers GET over HTTP/1.1 to unauthenticated clients: metrics, and the scheduler's page.
//
// One thread.  A connection has one request, a small one, and a short time; there are few at once,
// and where there is no room the address with the most of them loses its oldest one
// (tcp/greeter.h). So neither half a request nor a flood of them keeps a scrape waiting.
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
  std::string headers;  // more of them, each with its "\r\n"
};

class HttpServer {
 public:
  // What there is at a path, such as "/metrics".  Called in the server's thread.
  using Handler = std::function<HttpAnswer(const std::string& path)>;

  // Listens at `port` of each of `hosts`: names or addresses.  Those of `optional` may fail. Throws
  // Error naming the address and the reason.  `name` is that of the thread.
  HttpServer(const std::string& name, const std::vector<std::string>& hosts,
             const std::vector<std::string>& optional, int port, Handler handler);
  // Waits for the call of the handler in progress.
  ~HttpServer();
  // Of the first address; the kernel's choice where 0 was asked for.
  int port() const;
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// A request of at most so many bytes is answered.
constexpr size_t kMostHttpRequestBytes = 8192;
// What is answered to the bytes that came of a request; "" while more of them are needed.
std::string ReplyTo(const std::string& request, const HttpServer::Handler& handler);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_OBSERVE_HTTP_SERVER_H_
