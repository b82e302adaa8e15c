// What is served over HTTP to anybody, and to how many.
#include "byteps/observe/http_server.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <memory>
#include <string>
#include <vector>

#include "byteps/net/tcp/socket.h"
#include "byteps/observe/metrics_server.h"

namespace byteps {
namespace core {
namespace {

using ps::tcp::Fd;

class HttpServerTest : public testing::Test {
 protected:
  HttpServerTest()
      : server_("test", {"127.0.0.1"}, {}, 0, [](const std::string& path) {
          HttpAnswer answer;
          if (path == "/throws") throw std::runtime_error("what nobody but the log is told");
          if (path == "/nothing") answer.status = 404;
          answer.body = path == "/large" ? std::string(8 << 20, 'x') : "at " + path;
          return answer;
        }) {}

  Fd Connect() const {
    Fd fd(socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(server_.port());
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    const timeval limit = {60, 0};
    setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    return fd;
  }

  static void Say(const Fd& fd, const std::string& said) {
    EXPECT_EQ(send(fd.get(), said.data(), said.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(said.size()));
  }

  static std::string ReadAll(const Fd& fd) {
    std::string all;
    char part[4096];
    for (ssize_t n; (n = recv(fd.get(), part, sizeof(part), 0)) > 0;) all.append(part, n);
    return all;
  }

  std::string Ask(const std::string& said) const {
    const Fd fd = Connect();
    Say(fd, said);
    return ReadAll(fd);
  }

  HttpServer server_;
};

TEST_F(HttpServerTest, Answers) {
  const std::string said = Ask("GET /here?a=b HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(said.rfind("HTTP/1.1 200 OK\r\n", 0), 0u) << said;
  EXPECT_NE(said.find("\r\nContent-Length: 8\r\n"), std::string::npos) << said;
  EXPECT_EQ(said.substr(said.find("\r\n\r\n") + 4), "at /here");
}

TEST_F(HttpServerTest, ARequestMayComeByteByByte) {
  const Fd fd = Connect();
  for (const char c : std::string("GET /slow HTTP/1.0\n\n")) Say(fd, std::string(1, c));
  EXPECT_NE(ReadAll(fd).find("at /slow"), std::string::npos);
}

TEST_F(HttpServerTest, ALargeAnswerComesWhole) {
  const std::string said = Ask("GET /large HTTP/1.1\r\n\r\n");
  EXPECT_EQ(said.size() - said.find("\r\n\r\n") - 4, 8u << 20);
}

TEST_F(HttpServerTest, WhatIsNoRequestIsToldSo) {
  EXPECT_EQ(Ask("POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc").substr(9, 3), "405");
  EXPECT_EQ(Ask("what is this\r\n\r\n").substr(9, 3), "400");
  EXPECT_EQ(Ask("GET\r\n\r\n").substr(9, 3), "400");
  EXPECT_EQ(Ask("GET /nothing HTTP/1.1\r\n\r\n").substr(9, 3), "404");
  EXPECT_EQ(Ask("GET /" + std::string(9000, '/') + " HTTP/1.1\r\n\r\n").substr(9, 3), "431");
  const std::string thrown = Ask("GET /throws HTTP/1.1\r\n\r\n");
  EXPECT_EQ(thrown.substr(9, 3), "500");
  EXPECT_EQ(thrown.find("what nobody"), std::string::npos);
}

TEST_F(HttpServerTest, HalfRequestsKeepNobodyWaiting) {
  std::vector<Fd> halves;
  for (int i = 0; i < 300; ++i) {
    halves.push_back(Connect());
    Say(halves.back(), "GET / HTTP/1.1\r\nHost:");
  }
  EXPECT_NE(Ask("GET /here HTTP/1.1\r\n\r\n").find("at /here"), std::string::npos);
}

TEST(MetricsText, IsWhatPrometheusReads) {
  Metric counter{"byteps_things_total", Metric::kCounter, "Things, \\ and\nmore.", 3, {}, {}};
  Metric labelled{"byteps_open", Metric::kGauge, "Open.", 0.5, {}, {{"peer", "a \"b\""}}};
  Metric times{"byteps_seconds", Metric::kHistogram, "Times.", 0, {}, {}};
  times.histogram.cumulative.assign(Histogram::kBounds.size(), 1);
  times.histogram.count = 2;
  times.histogram.sum = 11.25;
  const MetricsSource source{Role::kServer, [] { return 7; },
                             [&] { return std::vector<Metric>{counter, labelled, times}; }};
  const std::string text = MetricsText(source);
  EXPECT_EQ(text.rfind("# HELP byteps_things_total Things, \\\\ and\\nmore.\n"
                       "# TYPE byteps_things_total counter\n"
                       "byteps_things_total{role=\"server\",rank=\"7\"} 3\n"
                       "# HELP byteps_open Open.\n"
                       "# TYPE byteps_open gauge\n"
                       "byteps_open{role=\"server\",rank=\"7\",peer=\"a \\\"b\\\"\"} 0.5\n"
                       "# HELP byteps_seconds Times.\n"
                       "# TYPE byteps_seconds histogram\n"
                       "byteps_seconds_count{role=\"server\",rank=\"7\"} 2\n"
                       "byteps_seconds_sum{role=\"server\",rank=\"7\"} 11.25\n"
                       "byteps_seconds_bucket{role=\"server\",rank=\"7\",le=\"0.0001\"} 1\n",
                       0),
            0u)
      << text;
  EXPECT_NE(
      text.find("le=\"10\"} 1\nbyteps_seconds_bucket{role=\"server\",rank=\"7\",le=\"+Inf\"} 2\n"),
      std::string::npos)
      << text;
}

}  // namespace
}  // namespace core
}  // namespace byteps
