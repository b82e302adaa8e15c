// Tests of nodes' reports, the scheduler's status, and the HTTP server.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <string>
#include <vector>

#include "byteps/base/log.h"
#include "byteps/cluster/channel.h"
#include "byteps/net/membership/event.h"
#include "byteps/net/tcp/fd.h"
#include "byteps/observe/histogram.h"
#include "byteps/observe/http_server.h"
#include "byteps/observe/lateness.h"
#include "byteps/observe/metrics.h"
#include "byteps/observe/status_board.h"
#include "byteps/observe/status_record.h"

namespace byteps {
namespace core {
namespace {

StatusRecord MakeRecord() {
  StatusRecord record;
  record.role = Role::kServer;
  record.pid = 4711;
  record.host = "dpu-3";
  record.clock_ns = 5'000'000'000;
  record.sent_bytes = 1;
  record.received_bytes = 2;
  record.finished = 3;
  record.failed = 4;
  record.running = 5;
  record.tensors = 6;
  record.keys = 7;
  record.queued = 8;
  record.busy_ns = 9;
  record.problems = 1;
  record.problem_unix_ms = -10;
  record.problem = "a word";
  record.sums_since = 11;
  record.late = {{3, 12, 13}, {1, 14, 15}};
  record.nics = {{"eth0", 16, 17}, {"eth1", 18, 19}};
  return record;
}

TEST(StatusRecord, ComesBackAsItWas) {
  const StatusRecord sent = MakeRecord();
  StatusRecord got;
  ASSERT_TRUE(StatusRecord::Parse(sent.Pack(), &got));
  EXPECT_EQ(got.Pack(), sent.Pack());
  EXPECT_EQ(got.host, "dpu-3");
  EXPECT_EQ(got.keys, 7u);
  EXPECT_EQ(got.problem_unix_ms, -10);
  ASSERT_EQ(got.late.size(), 2u);
  EXPECT_EQ(got.late[1].wait_ns, 15u);
  ASSERT_EQ(got.nics.size(), 2u);
  EXPECT_EQ(got.nics[1].nic, "eth1");
  EXPECT_EQ(got.nics[1].bytes_received, 19u);
}

TEST(StatusRecord, WhatIsTooLongIsCut) {
  StatusRecord record = MakeRecord();
  record.host.assign(1000, 'h');
  record.problem.assign(100000, 'p');
  record.late.resize(50);
  record.nics.assign(50, {std::string(100, 'n'), 1, 2});
  const std::string bytes = record.Pack();
  EXPECT_LE(bytes.size(), ps::kMaxReport);
  StatusRecord got;
  ASSERT_TRUE(StatusRecord::Parse(bytes, &got));
  EXPECT_EQ(got.host.size(), StatusRecord::kMaxHost);
  EXPECT_EQ(got.late.size(), StatusRecord::kMaxLate);
  ASSERT_EQ(got.nics.size(), StatusRecord::kMaxNics);
  EXPECT_EQ(got.nics[0].nic.size(), StatusRecord::kMaxNic);
}

TEST(StatusRecord, NothingElseIsTaken) {
  const std::string whole = MakeRecord().Pack();
  StatusRecord got;
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(StatusRecord::Parse(whole.substr(0, size), &got)) << size;
  }
  EXPECT_FALSE(StatusRecord::Parse(whole + "x", &got));
  std::string other = whole;
  other[0] = StatusRecord::kVersion + 1;
  EXPECT_FALSE(StatusRecord::Parse(other, &got));
  other = whole;
  other[1] = 17;  // not a role
  EXPECT_FALSE(StatusRecord::Parse(other, &got));
  // Any bytes must be parsed within bounds; a sanitizer checks that.
  for (size_t at = 0; at < whole.size(); ++at) {
    other = whole;
    other[at] = static_cast<char>(0xff);
    StatusRecord::Parse(other, &got);
  }
}

TEST(StatusRecord, LateWorkersAreToldOnce) {
  Lateness lateness;
  for (int rank = 0; rank < 10; ++rank) lateness.Add(rank, 100 * rank);
  lateness.Add(2, 5000);
  uint64_t sums = 0;
  std::vector<LateWorker> worst;
  lateness.Take(&sums, &worst);
  EXPECT_EQ(sums, 11u);
  ASSERT_EQ(worst.size(), StatusRecord::kMaxLate);
  EXPECT_EQ(worst[0].rank, 2u);
  EXPECT_EQ(worst[0].sums, 2u);
  EXPECT_EQ(worst[0].wait_ns, 5200u);
  EXPECT_EQ(worst[1].rank, 9u);
  lateness.Take(&sums, &worst);
  EXPECT_EQ(sums, 0u);
  EXPECT_TRUE(worst.empty());
}

ps::JobView OneServer() {
  ps::JobView view;
  view.phase = ps::JobView::kRunning;
  view.workers = view.servers = 1;
  ps::JobView::Peer server;
  server.node = {Role::kServer, ServerId(0), "[fd00::2]:77"};
  view.peers.push_back(server);
  return view;
}

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(StatusBoard, RatesAreThoseOfTheLastTwoRecords) {
  StatusBoard board("1.2", 10);
  board.Attach("fd00::1", 9000, OneServer);
  const int id = ServerId(0);
  StatusRecord record = MakeRecord();
  board.OnReport(id, record.Pack());
  EXPECT_TRUE(Has(board.Json(), "\"received_bytes_per_s\":0,"));
  record.clock_ns += 2'000'000'000;
  record.received_bytes += 5000;
  board.OnReport(id, record.Pack());
  const std::string json = board.Json();
  EXPECT_TRUE(Has(json, "\"received_bytes_per_s\":2500,")) << json;
  EXPECT_TRUE(Has(json, "\"scheduler\":\"[fd00::1]:9000\"")) << json;
  EXPECT_TRUE(Has(json, "\"address\":\"[fd00::2]:77\"")) << json;
  EXPECT_TRUE(Has(json, "\"keys\":7")) << json;
  EXPECT_TRUE(Has(json, "\"slowest_worker\":{\"rank\":1,\"last_in\":1.27273")) << json;
  // If another process has taken the node's rank, its counters start again from 0.
  record.pid = 4712;
  record.received_bytes = 0;
  board.OnReport(id, record.Pack());
  EXPECT_TRUE(Has(board.Json(), "\"received_bytes_per_s\":0,"));
}

TEST(StatusBoard, NicsHaveRowsWhereThereAreSeveral) {
  ps::JobView view = OneServer();
  StatusBoard board("1.2", 10);
  board.Attach("fd00::1", 9000, [&view] { return view; });
  const int id = ServerId(0);
  StatusRecord record = MakeRecord();
  board.OnReport(id, record.Pack());
  record.clock_ns += 2'000'000'000;
  record.nics = {{"eth0", 16, 8017}, {"eth1", 4'000'018, 19}, {"eth2", 6000, 0}};
  board.OnReport(id, record.Pack());
  const std::string json = board.Json();
  EXPECT_TRUE(Has(json, R"("by_nic":[{"nic":"eth0","received_bytes":8017,"received_bytes_per_s":)"
                        R"(4000,"sent_bytes":16,"sent_bytes_per_s":0},{"nic":"eth1",)"))
      << json;
  EXPECT_TRUE(Has(json, R"("sent_bytes":6000,"sent_bytes_per_s":3000}])")) << json;
  EXPECT_FALSE(Has(board.Text(), "eth1")) << board.Text();
  view.peers[0].node.nics = 3;
  const std::string text = board.Text();
  EXPECT_TRUE(Has(text, "\nnode         NIC                    in/s        in       out/s"))
      << text;
  EXPECT_TRUE(
      Has(text, "\nserver 0     eth1                  0 B/s      19 B    2.0 MB/s    4.0 MB\n"))
      << text;
}

TEST(StatusBoard, WhatNodesSayCannotBreakTheJson) {
  StatusBoard board("1.2", 10);
  board.Attach("h", 1, OneServer);
  StatusRecord record = MakeRecord();
  record.problem = "quote \" slash \\ line \n half \xc3 end </script>";
  const int id = ServerId(0);
  board.OnReport(id, record.Pack());
  EXPECT_TRUE(Has(board.Json(), R"("quote \" slash \\ line \u000a half \ufffd end </script>")"));
  EXPECT_FALSE(Has(board.Text(), "line \n"));
  board.OnReport(id, "rubbish");
  board.OnReport(id, "rubbish");
  const std::string json = board.Json();
  const size_t first = json.find("cannot read");
  EXPECT_NE(first, std::string::npos);
  EXPECT_EQ(json.find("cannot read", first + 1), std::string::npos) << "told once";
}

TEST(StatusBoard, ErrorsAreKeptUpToSomeNumber) {
  StatusBoard board("1.2", 10);
  board.Attach("h", 1, OneServer);
  StatusRecord record = MakeRecord();
  for (int i = 0; i < 100; ++i) {
    record.problems = i + 1;
    record.clock_ns += 1;
    record.problem = "problem " + std::to_string(i) + ".";
    board.OnReport(ServerId(0), record.Pack());
  }
  const std::string json = board.Json();
  EXPECT_TRUE(Has(json, "problem 99."));
  // One of the problems is this process's last problem, which another test may have logged.
  EXPECT_TRUE(Has(json, "problem 81."));
  EXPECT_FALSE(Has(json, "problem 79."));
  board.Detach();
  EXPECT_TRUE(Has(board.Json(), "\"state\":\"running\"")) << "as it was at last";
}

TEST(JsonText, IsAlwaysUtf8) {
  EXPECT_EQ(ps::JsonText("gr\xc3\xbc\xc3\x9f"), "\"gr\xc3\xbc\xc3\x9f\"");
  EXPECT_EQ(ps::JsonText("\xf0\x9f\x98\x80"), "\"\xf0\x9f\x98\x80\"");
  EXPECT_EQ(ps::JsonText("\xc0\x80|\xed\xa0\x80|\xf5"),
            "\"\\ufffd\\ufffd|\\ufffd\\ufffd\\ufffd|\\ufffd\"");
  EXPECT_EQ(ps::JsonText(std::string("\0\x1f\x7f", 3)), "\"\\u0000\\u001f\\u007f\"");
}

// ----- the HTTP server: its answers and its limits

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
