// What nodes tell the scheduler, and what it makes of it.
#include <gtest/gtest.h>

#include <string>

#include "byteps/base/text.h"
#include "byteps/cluster/node_ids.h"
#include "byteps/net/membership/event.h"
#include "byteps/observe/lateness.h"
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
  other[1] = 17;  // no role
  EXPECT_FALSE(StatusRecord::Parse(other, &got));
  // Whatever bytes it has, it is read within its bounds: a sanitizer would tell.
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
  // A new process in the old one's place begins anew.
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
  // The last problem of this process, which other tests may have logged, is one of them.
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

}  // namespace
}  // namespace core
}  // namespace byteps
