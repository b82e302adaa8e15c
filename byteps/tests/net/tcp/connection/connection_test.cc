// Tests of TCP connections: the pair for the transports' contract, two NICs each, ownership of sent
// memory, and damaged greetings.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "byteps/net/link/counters.h"
#include "byteps/net/link/link_van.h"
#include "byteps/net/link/peer_table.h"
#include "dmlc/logging.h"
#include "link.h"
#include "link_pair.h"

namespace contract {
namespace {

using connection_test::Hub;
using connection_test::Link;

class TcpPair : public LinkPair {
 public:
  TcpPair(bool encrypts, int nics)
      : nics_(nics),
        hub_(encrypts),
        link_(&hub_, connection_test::kJob, seen(kConnects), seen(kListens), nics) {
    CHECK(WaitUntil([&] { return Load(kConnects).is_open; }));
  }

  void Send(Side from, const ps::SArray<char>& value) override {
    link_.Send(from == kConnects, value);
  }
  // Breaks the connection. With two NICs, the NIC in use fails, and the other NIC works again.
  void Break() override {
    if (nics_ == 1) return hub_.relay.Reset(link_.route, {});
    hub_.relay.SetDown(first_is_down_ ? link_.route : link_.other_route, false);
    first_is_down_ = !first_is_down_;
    hub_.relay.SetDown(first_is_down_ ? link_.route : link_.other_route, true);
  }
  void CloseInOrder(Side side) override {
    End(side)->SayGoodbye();
    End(side)->CloseWhenFlushed();
  }
  void Close(Side side) override { End(side)->Close({"it was closed for a test", false, true}); }
  void Abandon(Side side, const void* begin, size_t bytes) override {
    End(side)->Abandon(begin, bytes);
  }
  bool AllArrived(Side side) override { return End(side)->all_arrived(); }
  ps::LinkLoad Load(Side side) override { return End(side)->load(); }

 private:
  ps::tcp::ConnectionPtr End(Side side) { return link_.EndOf(side == kConnects); }

  const int nics_;
  bool first_is_down_ = false;
  Hub hub_;
  Link link_;
};

}  // namespace

std::unique_ptr<LinkPair> MakeTcpPair(bool encrypts, int nics) {
  return std::make_unique<TcpPair>(encrypts, nics);
}

}  // namespace contract

namespace connection_test {
namespace {

// ----- closing a VanInbox waits for its users

TEST(VanInbox, ClosingWaitsForThoseWhoUseIt) {
  ps::VanInbox<int> inbox;
  EXPECT_FALSE(inbox.BeginUse());
  inbox.Open();
  ASSERT_TRUE(inbox.BeginUse());
  std::atomic<bool> closed{false};
  std::thread closes([&] {
    inbox.Close();
    closed = true;
  });
  EXPECT_TRUE(WaitUntil([&] { return !inbox.is_open(); }));
  EXPECT_FALSE(inbox.BeginUse());
  EXPECT_FALSE(closed);
  inbox.EndUse();
  closes.join();
}

// ----- two nodes with two NICs each

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
    // An unused path may fail.
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
    // Both ends and the relay are on this host, so they count for "lo".
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

// Pairs that are added later are as good as the first, so the connection does not go back.
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

// ----- ownership of sent memory

constexpr size_t kBytes = 300'000;

// An answer overwrites the memory that its push sent.
TEST(Sending, AnAnswerComesToTheMemoryThatWasSent) {
  for (const bool encrypts : {false, true}) {
    Hub hub(encrypts);
    Link link(&hub);
    ps::SArray<char> value(kBytes);
    link.connecting.ReceiveAt(value.data());
    std::vector<std::string> pushed, answered;
    for (int round = 0; round < 20; ++round) {
      pushed.emplace_back(kBytes, static_cast<char>('a' + round));
      memcpy(value.data(), pushed.back().data(), kBytes);
      std::thread([&] { link.Send(true, value); }).join();
      ASSERT_TRUE(WaitUntil([&] { return link.listening.texts() == pushed; })) << link.Text();
      answered.emplace_back(kBytes, static_cast<char>('A' + round));
      link.Send(false, answered.back());
      ASSERT_TRUE(WaitUntil([&] { return link.connecting.texts() == answered; })) << link.Text();
      EXPECT_EQ(std::string(value.data(), kBytes), answered.back());
    }
  }
}

// A deliberate race that ThreadSanitizer must report (tests/unit/test_sanitizers.py).
TEST(Sending, DISABLED_MemoryThatChanges) {
  Hub hub(false);
  Link link(&hub);
  ps::SArray<char> value(kBytes);
  memset(value.data(), 1, kBytes);
  link.Send(true, "one");
  ASSERT_TRUE(WaitUntil([&] { return link.Has({"one"}, {}); })) << link.Text();
  std::atomic<bool> sent{false};
  std::thread sends([&] {
    link.Send(true, value);
    sent.store(true, std::memory_order_relaxed);
  });
  // This is later than the call, but does not wait for the message's end.
  while (!sent.load(std::memory_order_relaxed)) continue;
  memset(value.data(), 2, kBytes);
  sends.join();
}

// ----- damage at every position of a greeting that resumes a link: the link must survive, and no
// message may be lost

using std::chrono::milliseconds;
using Kind = Damage::Kind;

// Links tested concurrently, with four sockets each.
constexpr size_t kLinks = 200;

// Returns whether to test all positions; otherwise only some, because each costs time.
bool Thorough() { return getenv("CONNECTION_TEST_THOROUGH") != nullptr; }

struct GreetingBytes {
  size_t to_listener = 0;
  size_t back = 0;
};

// Returns the number of bytes in the greetings that resume a connection without queued messages.
GreetingBytes Measure(Hub* hub) {
  Link link(hub);
  EXPECT_TRUE(WaitUntil([&] { return hub->relay.CarriedBy(link.route, false) > 0; }));
  link.Send(true, "one");
  EXPECT_TRUE(WaitUntil([&] { return link.Has({"one"}, {}); })) << link.Text();
  std::this_thread::sleep_for(milliseconds(100));  // until the message is acknowledged
  hub->relay.Reset(link.route, {});
  EXPECT_TRUE(WaitUntil([&] {
    return link.connecting.times_resumed() == 1 && link.listening.times_resumed() == 1;
  })) << link.Text();
  return {hub->relay.CarriedBy(link.route, true), hub->relay.CarriedBy(link.route, false)};
}

std::string Describe(const Damage& damage) {
  static const char* const kNames[] = {"none", "flip", "insert", "cut", "delay"};
  return std::string(kNames[static_cast<int>(damage.kind)]) + " of " + std::to_string(damage.bits) +
         " at " + std::to_string(damage.place) +
         (damage.to_listener ? " to who listens" : " to who connects");
}

// Makes a link for each damage, concurrently, and expects it to survive.
void Suffer(Hub* hub, const std::vector<Damage>& damages) {
  std::vector<std::unique_ptr<Link>> links;
  for (size_t i = 0; i < damages.size(); ++i) links.push_back(std::make_unique<Link>(hub));
  const auto name = [](const char* what, size_t i) { return what + std::to_string(i); };
  for (size_t i = 0; i < links.size(); ++i) links[i]->Send(true, name("push ", i));
  for (size_t i = 0; i < links.size(); ++i) {
    ASSERT_TRUE(WaitUntil([&] { return links[i]->Has({name("push ", i)}, {}); }));
    links[i]->Send(false, name("answer ", i));
  }
  for (size_t i = 0; i < links.size(); ++i) {
    ASSERT_TRUE(WaitUntil([&] { return links[i]->Has({name("push ", i)}, {name("answer ", i)}); }));
    hub->relay.Reset(links[i]->route, damages[i]);
    links[i]->Send(true, name("another push ", i));
    links[i]->Send(false, name("another answer ", i));
  }
  for (size_t i = 0; i < links.size(); ++i) {
    Link& link = *links[i];
    const auto whole = [&] {
      return link.Has({name("push ", i), name("another push ", i)},
                      {name("answer ", i), name("another answer ", i)});
    };
    const auto over = [&] {
      return !link.connecting.ending().empty() || !link.listening.ending().empty();
    };
    EXPECT_TRUE(WaitUntil([&] { return over() || (whole() && hub->relay.damaged(link.route)); }))
        << Describe(damages[i]) << ": " << link.Text();
    EXPECT_FALSE(over()) << Describe(damages[i]) << ": " << link.Text();
    EXPECT_TRUE(whole()) << Describe(damages[i]) << ": " << link.Text();
  }
}

class Greeting : public testing::TestWithParam<bool> {
 protected:
  Greeting() : hub_(GetParam()) {}

  // Runs the test with the damages that `make` returns, at each position, in both directions.
  template <typename Make>
  void Everywhere(const Make& make, size_t step = 1) {
    const GreetingBytes bytes = Measure(&hub_);
    ASSERT_GT(bytes.to_listener, 0u);
    ASSERT_GT(bytes.back, 0u);
    std::vector<Damage> damages;
    const auto end = [&] {
      Suffer(&hub_, damages);
      damages.clear();
    };
    for (const bool to_listener : {true, false}) {
      const size_t count = to_listener ? bytes.to_listener : bytes.back;
      for (size_t place = 0; place < count; place += Thorough() ? 1 : step) {
        for (Damage damage : make(place)) {
          damage.to_listener = to_listener;
          damage.place = place;
          damages.push_back(damage);
          if (damages.size() == kLinks) end();
        }
      }
    }
    end();
  }

  Hub hub_;
};

Damage Of(Kind kind, unsigned char bits = 1, milliseconds delay = {}) {
  Damage damage;
  damage.kind = kind;
  damage.bits = bits;
  damage.delay = delay;
  return damage;
}

TEST_P(Greeting, AFlippedBitIsOneMoreAttempt) {
  Everywhere(
      [](size_t place) {
        std::vector<Damage> damages;
        for (size_t bit = 0; bit < 8; ++bit) {
          // One bit of each byte is flipped; with Thorough, each bit.
          if (Thorough() || bit == place % 8) damages.push_back(Of(Kind::kFlip, 1 << bit));
        }
        return damages;
      },
      5);
}

TEST_P(Greeting, AByteTooManyIsOneMoreAttempt) {
  Everywhere([](size_t) { return std::vector<Damage>{Of(Kind::kInsert, 0xa5)}; }, 7);
}

TEST_P(Greeting, AnEndInTheMiddleIsOneMoreAttempt) {
  Everywhere([](size_t) { return std::vector<Damage>{Of(Kind::kCut)}; }, 7);
}

TEST_P(Greeting, ADelayCostsTime) {
  Everywhere([](size_t) { return std::vector<Damage>{Of(Kind::kDelay, 1, milliseconds(1700))}; },
             29);
}

// Tests of links whose listener refuses to resume them.
class Refusal : public testing::TestWithParam<bool> {
 protected:
  Refusal() : hub_(GetParam()) {}

  // Returns the reason with which the connecting end has closed.
  template <typename Change>
  std::string After(const Change& change) {
    Link link(&hub_);
    link.Send(true, "one");
    EXPECT_TRUE(WaitUntil([&] { return link.Has({"one"}, {}); })) << link.Text();
    change(&link);
    const auto begin = std::chrono::steady_clock::now();
    hub_.relay.Reset(link.route, {});
    EXPECT_TRUE(WaitUntil([&] { return !link.connecting.ending().empty(); })) << link.Text();
    took_s_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return link.connecting.ending();
  }

  Hub hub_;
  double took_s_ = 0;
};

TEST_P(Refusal, ThatIsProvedIsFinal) {
  hub_.settings.reconnect_s = 1000;
  EXPECT_EQ(After([](Link* link) { link->GiveUp(); }),
            "it refused the connection: \"this node has given the connection up\"");
  EXPECT_EQ(After([](Link* link) { link->BelongTo(5); }), "it belongs to another job");
}

// A worker may learn of a new generation before a server does.
TEST_P(Refusal, OfAnEarlierGenerationPasses) {
  Link link(&hub_, kJob - 1);
  link.Send(true, "one");
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_EQ(link.connecting.ending(), "");
  link.BelongTo(kJob);
  EXPECT_TRUE(WaitUntil([&] { return link.Has({"one"}, {}); })) << link.Text();
}

TEST_P(Refusal, OfALaterGenerationIsFinal) {
  Link link(&hub_, kJob + 1);
  EXPECT_TRUE(WaitUntil([&] { return !link.connecting.ending().empty(); }));
}

TEST_P(Refusal, ThatIsNotProvedCountsAsAFailedAttemptUntilTheTimeIsOver) {
  hub_.settings.reconnect_s = 0.7;
  const std::string reason = After([](Link* link) { link->ForgetTheSecret(); });
  EXPECT_GE(took_s_, 0.6);
  EXPECT_NE(
      reason.find("could not be made again within 0.7 s (BYTEPS_RECONNECT_TIMEOUT_S=0.7): the "
                  "two nodes have different job secrets"),
      std::string::npos)
      << reason;
}

INSTANTIATE_TEST_SUITE_P(Connections, Refusal, testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Tls" : "Plain"; });

INSTANTIATE_TEST_SUITE_P(Connections, Greeting, testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Tls" : "Plain"; });

}  // namespace
}  // namespace connection_test
