#include "byteps/observe/http_server.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/tcp/fd.h"
#include "byteps/net/tcp/leftovers.h"
#include "byteps/net/tcp/listener.h"
#include "byteps/net/tcp/pending_peers.h"
#include "byteps/net/tcp/poller.h"
#include "byteps/net/tcp/socket.h"

namespace byteps {
namespace core {
namespace {

using ps::tcp::Fd;
using ps::tcp::Leftovers;
using ps::tcp::PendingPeers;

constexpr size_t kConnections = 64;
constexpr auto kTime = std::chrono::seconds(10);
constexpr auto kLeastTime = std::chrono::milliseconds(50);

const char* ReasonOf(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 431:
      return "Request Header Fields Too Large";
    default:
      return "Internal Server Error";
  }
}

std::string Encode(const HttpAnswer& answer) {
  return "HTTP/1.1 " + std::to_string(answer.status) + " " + ReasonOf(answer.status) +
         "\r\nContent-Type: " + answer.type +
         "\r\nContent-Length: " + std::to_string(answer.body.size()) + "\r\n" + answer.headers +
         "X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n" + answer.body;
}

HttpAnswer Refusal(int status, const std::string& text) {
  HttpAnswer answer;
  answer.status = status;
  answer.body = text + "\n";
  return answer;
}

// Answers a request whose first line is `line`: METHOD SP TARGET SP HTTP/1.x.
HttpAnswer AnswerTo(const std::string& line, const HttpServer::Handler& handler) {
  const size_t first = line.find(' '), last = line.rfind(' ');
  if (first == std::string::npos || first == last || line.compare(last + 1, 7, "HTTP/1.") != 0) {
    return Refusal(400, "this is HTTP/1.1");
  }
  if (line.substr(0, first) != "GET") {
    HttpAnswer answer = Refusal(405, "only GET is served here");
    answer.headers = "Allow: GET\r\n";
    return answer;
  }
  const std::string target = line.substr(first + 1, last - first - 1);
  try {
    return handler(target.substr(0, target.find('?')));
  } catch (const std::exception& e) {
    BPS_LOG(ERROR) << "a request over HTTP failed: " << e.what();
    return Refusal(500, "this failed; the log says why");
  }
}

// Removes the brackets of an IPv6 address.
std::string WithoutBrackets(const std::string& host) {
  const bool brackets = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return brackets ? host.substr(1, host.size() - 2) : host;
}

class HttpConnection : public ps::tcp::PendingPeer,
                       public std::enable_shared_from_this<HttpConnection> {
 public:
  HttpConnection(const HttpServer::Handler* handler, ps::tcp::Poller* poller, PendingPeers* pending,
                 Fd fd)
      : handler_(handler), poller_(poller), pending_(pending), fd_(std::move(fd)) {}

  void Start() { poller_->Watch(fd_.get(), shared_from_this()); }

  void End(const std::string& /*reason*/) override {
    if (!fd_) return;
    const auto self = shared_from_this();
    poller_->Forget(fd_.get());
    fd_.Close();
    pending_->Remove(this);
  }
  void ResetOnEnd() override { ps::tcp::ResetOnClose(fd_.get()); }
  // Returns false, because answered connections are closed first, and this client may still be
  // reading.
  bool answered() const override { return false; }

  bool OnReady(uint32_t events) override {
    if (!fd_) return false;
    if (phase_ == Phase::kRequest && events == EPOLLOUT) return false;
    if (phase_ == Phase::kRequest) Read();
    if (phase_ == Phase::kAnswer) Write();
    if (phase_ != Phase::kAnswered) return false;
    const Leftovers::Result result = leftovers_.Read(fd_.get());
    if (result == Leftovers::kEnd) End("");
    return result == Leftovers::kMore;
  }

 private:
  enum class Phase { kRequest, kAnswer, kAnswered, kDone };

  void Finish() {
    phase_ = Phase::kDone;
    End("");
  }

  void Read() {
    char part[2048];
    while (phase_ == Phase::kRequest) {
      const ssize_t n = recv(fd_.get(), part, sizeof(part), MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (n <= 0) return Finish();
      text_.append(part, n);
      std::string reply = ReplyTo(text_, *handler_);
      if (reply.empty()) continue;
      text_ = std::move(reply);
      phase_ = Phase::kAnswer;
    }
  }

  void Write() {
    while (written_ < text_.size()) {
      const ssize_t n = send(fd_.get(), text_.data() + written_, text_.size() - written_,
                             MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (n < 0) return Finish();
      written_ += n;
    }
    shutdown(fd_.get(), SHUT_WR);
    phase_ = Phase::kAnswered;
  }

  const HttpServer::Handler* const handler_;
  ps::tcp::Poller* const poller_;
  PendingPeers* const pending_;
  Fd fd_;
  Phase phase_ = Phase::kRequest;
  std::string text_;  // the request, then the answer
  size_t written_ = 0;
  Leftovers leftovers_;
};

}  // namespace

std::string ReplyTo(const std::string& request, const HttpServer::Handler& handler) {
  // An empty line ends the head; the rest is ignored.
  const size_t end = std::min(request.find("\r\n\r\n"), request.find("\n\n"));
  if (end < kMostHttpRequestBytes) {
    return Encode(AnswerTo(request.substr(0, request.find_first_of("\r\n")), handler));
  }
  if (request.size() < kMostHttpRequestBytes) return "";
  return Encode(Refusal(431, "a request has no more than 8 KiB here"));
}

class HttpServer::Impl {
 public:
  Impl(const std::string& name, Handler handler)
      : handler_(std::move(handler)),
        poller_(name),
        pending_(&poller_, {kConnections, kLeastTime, kTime, "it took too long",
                            "ask over HTTP and have no answer yet"}) {}

  ~Impl() {
    poller_.Stop();
    pending_.Clear();
  }

  void Listen(const std::string& host, int port) {
    for (const auto& address : ps::Resolve(WithoutBrackets(host), port)) {
      if (!addresses_.insert(address.Text()).second) continue;
      try {
        int bound = port != 0 ? port : port_;
        listeners_.push_back(std::make_shared<ps::tcp::Listener>(
            &poller_, ps::tcp::Listen(address, &bound), [this] { return pending_.MayAdd(); },
            [this](Fd fd, const ps::Address& from) { OnAccepted(std::move(fd), from); }));
        if (port_ == 0) port_ = bound;
      } catch (const Error& e) {
        throw Error(address.Text() + ": " + e.what());
      }
    }
  }

  int port() const { return port_; }

  void Start() {
    for (const auto& listener : listeners_) listener->Start();
  }

 private:
  void OnAccepted(Fd fd, const ps::Address& from) {
    const auto connection =
        std::make_shared<HttpConnection>(&handler_, &poller_, &pending_, std::move(fd));
    pending_.Add(connection, from);
    try {
      connection->Start();
    } catch (const Error& e) {
      connection->End(e.what());
    }
  }

  const Handler handler_;
  ps::tcp::Poller poller_;
  PendingPeers pending_;
  int port_ = 0;
  std::set<std::string> addresses_;
  std::vector<std::shared_ptr<ps::tcp::Listener>> listeners_;
};

HttpServer::HttpServer(const std::string& name, const std::vector<std::string>& hosts,
                       const std::vector<std::string>& optional, int port, Handler handler)
    : impl_(std::make_unique<Impl>(name, std::move(handler))) {
  for (const auto& host : hosts) impl_->Listen(host, port);
  for (const auto& host : optional) {
    try {
      impl_->Listen(host, port);
    } catch (const Error& e) {
      BPS_LOG(WARNING) << name << " over HTTP cannot be served at " << e.what();
    }
  }
  impl_->Start();
}

HttpServer::~HttpServer() = default;

int HttpServer::port() const { return impl_->port(); }

}  // namespace core
}  // namespace byteps
