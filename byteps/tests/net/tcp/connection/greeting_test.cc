// Damage to the greeting of a connection that is made again, at every place: it costs time, and
// neither the connection nor a message.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "link.h"

namespace connection_test {
namespace {

using std::chrono::milliseconds;
using Kind = Damage::Kind;

// At once, each with four sockets.
constexpr size_t kLinks = 200;

// One in so many places is tried, unless all are asked for.
bool Thorough() { return getenv("CONNECTION_TEST_THOROUGH") != nullptr; }

struct GreetingBytes {
  size_t to_listener = 0;
  size_t back = 0;
};

// Of a connection that is made again when nothing is to be sent.
GreetingBytes Measure(Hub* hub) {
  Link link(hub);
  EXPECT_TRUE(WaitUntil([&] { return hub->relay.CarriedBy(link.route, false) > 0; }));
  link.Send(true, "one");
  EXPECT_TRUE(WaitUntil([&] { return link.Has({"one"}, {}); })) << link.Text();
  std::this_thread::sleep_for(milliseconds(100));  // until it has told that it has it
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

// Several links at once, each of which suffers one of these.
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

  // At each place of both directions what `make` says.
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
          // Another bit of each byte, unless all are asked for.
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

// Links whose listener changes its mind while the connection is broken.
class Refusal : public testing::TestWithParam<bool> {
 protected:
  Refusal() : hub_(GetParam()) {}

  // The reason why the end that connects has closed.
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

// The scheduler's word on the new incarnation may reach a worker before it reaches a server.
TEST_P(Refusal, OfAnEarlierIncarnationPasses) {
  Link link(&hub_, kJob - 1);
  link.Send(true, "one");
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_EQ(link.connecting.ending(), "");
  link.BelongTo(kJob);
  EXPECT_TRUE(WaitUntil([&] { return link.Has({"one"}, {}); })) << link.Text();
}

TEST_P(Refusal, OfALaterIncarnationIsFinal) {
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
