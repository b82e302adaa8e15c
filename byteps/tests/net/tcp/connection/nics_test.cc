// A connection between two nodes of two NICs each.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "byteps/net/link/nic_counters.h"
#include "link.h"

namespace connection_test {
namespace {

bool GoesBy(Link* link, const std::string& host) {
  const std::string address = link->connection()->address();
  return link->connection()->open() && address.find(" to " + host + ":") != std::string::npos;
}

TEST(ConnectionOverNics, LeavesOneThatFailsAndGoesBack) {
  for (const bool encrypts : {false, true}) {
    Hub hub(encrypts);
    Link link(&hub, kJob, nullptr, nullptr, 2);
    std::vector<std::string> pushed, answered;
    const auto exchange = [&] {
      pushed.push_back("push " + std::to_string(pushed.size()));
      link.Send(true, pushed.back());
      EXPECT_TRUE(WaitUntil([&] { return link.Has(pushed, answered); })) << link.Text();
      answered.push_back("answer " + std::to_string(answered.size()));
      link.Send(false, answered.back());
      EXPECT_TRUE(WaitUntil([&] { return link.Has(pushed, answered); })) << link.Text();
    };
    exchange();
    EXPECT_TRUE(GoesBy(&link, "127.0.0.1")) << link.connection()->address();
    hub.relay.SetDown(link.route, true);
    ASSERT_TRUE(WaitUntil([&] { return GoesBy(&link, "127.0.0.2"); })) << link.Text();
    exchange();
    hub.relay.SetDown(link.route, false);
    ASSERT_TRUE(WaitUntil([&] { return GoesBy(&link, "127.0.0.1"); })) << link.Text();
    exchange();
    // That which it does not use may fail.
    const int resumed = link.connecting.times_resumed();
    EXPECT_GE(resumed, 2);
    hub.relay.SetDown(link.other_route, true);
    exchange();
    EXPECT_EQ(link.connecting.times_resumed(), resumed);
  }
}

TEST(ConnectionOverNics, CountsAtTheNicWhatItReadsAndWrites) {
  for (const bool encrypts : {false, true}) {
    Hub hub(encrypts);
    Link link(&hub);
    ASSERT_TRUE(WaitUntil([&] { return link.connection()->open(); })) << link.Text();
    // Both ends and the relay are on this host.
    ps::NicCounters* const counters = ps::CountersOfNic("127.0.0.1", "127.0.0.1");
    const uint64_t sent = counters->bytes_sent, received = counters->bytes_received;
    const std::string text(10'000, 'x');
    link.Send(true, text);
    ASSERT_TRUE(WaitUntil([&] { return link.Has({text}, {}); })) << link.Text();
    for (const uint64_t more : {counters->bytes_sent - sent, counters->bytes_received - received}) {
      EXPECT_GE(more, text.size());
      EXPECT_LE(more, text.size() + 1000);
    }
  }
}

// Pairs that are told of later are as good as the first: the connection does not go back.
TEST(ConnectionOverNics, LearnsOfOthers) {
  Hub hub(false);
  Link link(&hub);
  ASSERT_TRUE(WaitUntil([&] { return link.connection()->open(); })) << link.Text();
  const int other = hub.relay.AddRoute(link.port(), 2, hub.relay.PortOf(link.route));
  link.connection()->AddPairs({{"127.0.0.2", "127.0.0.2"}});
  hub.relay.SetDown(link.route, true);
  ASSERT_TRUE(WaitUntil([&] { return GoesBy(&link, "127.0.0.2"); })) << link.Text();
  link.Send(true, "a message");
  ASSERT_TRUE(WaitUntil([&] { return link.Has({"a message"}, {}); })) << link.Text();
  hub.relay.SetDown(link.route, false);
  hub.relay.Reset(other, {});
  ASSERT_TRUE(WaitUntil([&] { return link.connecting.times_resumed() >= 2; })) << link.Text();
  EXPECT_TRUE(GoesBy(&link, "127.0.0.2")) << link.connection()->address();
}

}  // namespace
}  // namespace connection_test
