// Tests of unauthenticated peers: what a listener reads, which connections it closes, and the
// placement of pollers.
#include "byteps/net/tcp/greeter.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "byteps/base/log.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/tcp/greeter.h"
#include "byteps/net/tcp/pending_peers.h"
#include "byteps/net/tcp/pollers.h"

namespace ps {
namespace tcp {
namespace {

class GreeterTest : public testing::Test {
 protected:
  GreeterTest() {
    int both[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, both), 0);
    peer_ = Fd(both[0]);
    other_ = Fd(dup(both[1]));
    host_.secret = &secret_;
    host_.challenge = [](const Hello&) { return Challenge(); };
    host_.admit = [](const StreamPtr&, const Hello&) { return ""; };
    host_.done = [this](const Greeter*) { done_ = true; };
    greeter_ =
        std::make_shared<Greeter>(&host_, std::make_shared<Poller>(0), Fd(both[1]), "10.0.0.9");
  }

  // Sends as much as the kernel takes.
  size_t SayJunk() {
    const std::string junk(1 << 16, '\xff');
    size_t bytes = 0;
    for (ssize_t n; (n = send(peer_.get(), junk.data(), junk.size(), MSG_NOSIGNAL)) > 0;) {
      bytes += n;
    }
    return bytes;
  }

  size_t Unread() const {
    int bytes = 0;
    EXPECT_EQ(ioctl(other_.get(), FIONREAD, &bytes), 0);
    return bytes;
  }

  auth::Secret secret_;
  Greeter::Host host_;
  Fd peer_;
  Fd other_;  // the greeter's end, to see what waits there
  std::shared_ptr<Greeter> greeter_;
  bool done_ = false;
};

TEST_F(GreeterTest, APeerThatIsRefusedIsReadLittleByLittle) {
  const size_t said = SayJunk();
  ASSERT_GT(said, 100'000u);
  EXPECT_TRUE(greeter_->OnReady(EPOLLIN));
  EXPECT_GT(Unread(), said - 40'000);
  EXPECT_TRUE(greeter_->answered());
  char answer[4096];
  const ssize_t n = recv(peer_.get(), answer, sizeof(answer), 0);
  EXPECT_NE(std::string(answer, n).find("does not speak this protocol"), std::string::npos);
}

TEST_F(GreeterTest, APeerThatNeverStopsIsClosed) {
  size_t said = 0;
  while (!done_ && said < 64 << 20) {
    said += SayJunk();
    while (greeter_->OnReady(0)) continue;
  }
  EXPECT_TRUE(done_);
  EXPECT_LT(said, 1u << 20);
}

TEST_F(GreeterTest, APeerThatIsRefusedAndCloses) {
  SayJunk();
  while (greeter_->OnReady(EPOLLIN)) continue;
  if (!done_) {
    peer_.Close();
    while (greeter_->OnReady(EPOLLIN)) continue;
  }
  EXPECT_TRUE(done_);
}

TEST(ForeignText, IsQuotedPrintableAndShort) {
  EXPECT_EQ(ForeignText("a job's secret"), "\"a job's secret\"");
  EXPECT_EQ(ForeignText("\x1b[2J\nERROR \"x\" \xff\\"),
            "\"\\x1b[2J\\x0aERROR \\x22x\\x22 \\xff\\x5c\"");
  EXPECT_EQ(ForeignText(std::string(1000, 'x'), 3), "\"xxx\"...");
  EXPECT_EQ(ForeignText(std::string("\0", 1)), "\"\\x00\"");
}

TEST(CutText, EndsWithAWholeCharacter) {
  const std::string text = "a\xc3\xa9\xf0\x9f\x9a\x80";  // characters of 1, 2 and 4 bytes
  EXPECT_EQ(CutText(text, 7), text);
  for (const size_t most : {3, 4, 5, 6}) EXPECT_EQ(CutText(text, most), "a\xc3\xa9") << most;
  EXPECT_EQ(CutText(text, 2), "a");
  EXPECT_EQ(CutText("\x80\x80\x80\x80\x80\x80", 5).size(), 1u) << "no character at all";
}

TEST(WriteLogLine, WritesUtf8WhateverIsSaid) {
  testing::internal::CaptureStderr();
  WriteLogLine('I', __FILE__, __LINE__,
               "a rocket, \xf0\x9f\x9a\x80, and most of one, \xf0\x9f\x9a");
  FlushLog(10);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("a rocket, \xf0\x9f\x9a\x80, and most of one, \xef\xbf\xbd"),
            std::string::npos)
      << said;
  EXPECT_EQ(said.find("\xf0\x9f\x9a\xef"), std::string::npos) << said;
}

// ----- the choice of unauthenticated connections to close

Address At(const std::string& text) {
  Address address;
  memset(&address.storage, 0, sizeof(address.storage));
  if (text.find(':') == std::string::npos) {
    address.storage.ss_family = AF_INET;
    inet_pton(AF_INET, text.c_str(), &reinterpret_cast<sockaddr_in*>(&address.storage)->sin_addr);
  } else {
    address.storage.ss_family = AF_INET6;
    inet_pton(AF_INET6, text.c_str(),
              &reinterpret_cast<sockaddr_in6*>(&address.storage)->sin6_addr);
  }
  return address;
}

struct FakePeer : PendingPeer {
  void End(const std::string& reason) override {
    ended = reason;
    owner->Remove(this);
  }
  void ResetOnEnd() override { reset = true; }
  bool answered() const override { return was_answered; }
  bool OnReady(uint32_t /*events*/) override { return false; }

  PendingPeers* owner = nullptr;
  std::string ended;
  bool reset = false;
  bool was_answered = false;
};

class PendingPeersTest : public testing::Test {
 protected:
  void Make(size_t room, Poller::Clock::duration time = std::chrono::hours(1),
            Poller::Clock::duration least = {}) {
    poller_ = std::make_unique<Poller>(0);
    pending_ = std::make_unique<PendingPeers>(
        poller_.get(), PendingPeers::Limits{room, least, time, "late", "have said nothing"});
  }
  void TearDown() override { poller_->Stop(); }

  std::shared_ptr<FakePeer> Add(const std::string& address) {
    auto peer = std::make_shared<FakePeer>();
    peer->owner = pending_.get();
    pending_->Add(peer, At(address));
    return peer;
  }

  std::unique_ptr<Poller> poller_;
  std::unique_ptr<PendingPeers> pending_;
};

TEST_F(PendingPeersTest, TheAddressWithTheMostLosesItsOldest) {
  Make(4);
  const auto honest = Add("10.0.0.1");
  const auto first = Add("10.0.0.2");
  const auto second = Add("10.0.0.2");
  const auto third = Add("10.0.0.2");
  const auto fourth = Add("10.0.0.2");
  EXPECT_TRUE(first->reset);
  EXPECT_NE(first->ended, "");
  for (const auto& peer : {honest, second, third, fourth}) EXPECT_EQ(peer->ended, "");
  EXPECT_EQ(pending_->size(), 4u);
}

TEST_F(PendingPeersTest, OneAddressFloodsAndTheOthersStay) {
  Make(8);
  const std::vector<std::shared_ptr<FakePeer>> honest = {Add("10.0.0.1"), Add("10.0.0.3")};
  for (int i = 0; i < 1000; ++i) Add("10.0.0.2");
  for (const auto& peer : honest) EXPECT_EQ(peer->ended, "");
  EXPECT_EQ(pending_->size(), 8u);
}

TEST_F(PendingPeersTest, OfManyAddressesTheOldestGoes) {
  Make(3);
  const auto first = Add("10.0.0.1");
  const auto second = Add("10.0.0.2");
  Add("10.0.0.3");
  Add("10.0.0.4");
  EXPECT_NE(first->ended, "");
  EXPECT_EQ(second->ended, "");
}

TEST_F(PendingPeersTest, OneHostHasANetworkOfIpv6) {
  Make(3);
  const auto honest = Add("2001:db8:1::1");
  const auto first = Add("2001:db8:2::1");
  Add("2001:db8:2::2");
  Add("2001:db8:2::3");
  EXPECT_EQ(honest->ended, "");
  EXPECT_NE(first->ended, "");
}

TEST_F(PendingPeersTest, ThoseThatWereAnsweredGoFirst) {
  Make(3);
  Add("10.0.0.2");
  const auto answered = Add("10.0.0.1");
  answered->was_answered = true;
  const auto third = Add("10.0.0.2");
  Add("10.0.0.2");
  EXPECT_NE(answered->ended, "");
  EXPECT_EQ(third->ended, "");
}

TEST_F(PendingPeersTest, TheNewestIsLetInWhenTheOldestHasHadItsTime) {
  Make(2, std::chrono::hours(1), std::chrono::hours(1));
  Add("10.0.0.1");
  EXPECT_TRUE(pending_->MayAdd());
  Add("10.0.0.1");
  EXPECT_FALSE(pending_->MayAdd());
  Make(2);
  Add("10.0.0.1");
  Add("10.0.0.1");
  EXPECT_TRUE(pending_->MayAdd());
}

TEST_F(PendingPeersTest, ThatTheyAreTooManyIsOneLine) {
  Make(2);
  testing::internal::CaptureStderr();
  for (int i = 0; i < 5000; ++i) Add("10.0.0.2");
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  EXPECT_NE(said.find("2 at once have said nothing, 2 of them from 10.0.0.2"), std::string::npos)
      << said;
}

TEST_F(PendingPeersTest, EachHasItsTime) {
  Make(8, std::chrono::milliseconds(20));
  std::promise<std::vector<std::shared_ptr<FakePeer>>> made;
  poller_->Post([&] { made.set_value({Add("10.0.0.1"), Add("10.0.0.2")}); });
  const auto peers = made.get_future().get();
  // Timers run in order.
  std::promise<void> later;
  poller_->At(Poller::Clock::now() + std::chrono::milliseconds(60), [&] { later.set_value(); });
  later.get_future().wait();
  for (const auto& peer : peers) {
    EXPECT_EQ(peer->ended, "late");
    EXPECT_FALSE(peer->reset);
  }
}

// ----- the placement of pollers, and their connections

HostNic NicAt(const std::string& address, int numa) {
  HostNic nic;
  nic.name = "eth" + std::to_string(numa);
  nic.nic.address = address;
  nic.numa = numa;
  return nic;
}

// Returns two NUMA nodes: one has the first usable core of this machine, the other the last.
NumaNodes TwoNodes() {
  const std::set<int> allowed = AllowedCores();
  return {{0, {*allowed.begin()}}, {1, {*allowed.rbegin()}}};
}

std::set<int> CoresOf(Poller* poller) {
  std::promise<std::set<int>> cores;
  poller->Post([&cores] { cores.set_value(AllowedCores()); });
  return cores.get_future().get();
}

TEST(Pollers, RunOnTheNodeOfTheNicThatTheyServe) {
  const NumaNodes nodes = TwoNodes();
  Pollers pollers(2, 1 << 20);
  pollers.ServeNics({NicAt("10.0.0.1", 0), NicAt("10.0.1.1", 1)}, nodes);
  const Pollers::Place first = pollers.Next("10.0.0.1"), second = pollers.Next("10.0.1.1");
  EXPECT_EQ(CoresOf(first.poller.get()), nodes.at(0));
  EXPECT_EQ(CoresOf(second.poller.get()), nodes.at(1));
  EXPECT_NE(first.pool, second.pool);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(pollers.Next("10.0.0.1").poller, first.poller);
    EXPECT_EQ(pollers.Next("10.0.1.1").pool, second.pool);
  }
  // Connections without a NIC use all pollers round robin.
  EXPECT_EQ(pollers.Next("").poller, first.poller);
  EXPECT_EQ(pollers.Next("").poller, second.poller);
  pollers.Stop();
}

TEST(Pollers, OfAHostWithOneNodeRunAnywhere) {
  Pollers pollers(2, 1 << 20);
  pollers.ServeNics({NicAt("10.0.0.1", 0), NicAt("10.0.1.1", 0)}, {{0, AllowedCores()}});
  const Pollers::Place first = pollers.Next("10.0.0.1"), second = pollers.Next("10.0.0.1");
  EXPECT_NE(first.poller, second.poller);
  EXPECT_EQ(first.pool, second.pool);
  EXPECT_EQ(CoresOf(first.poller.get()), AllowedCores());
  pollers.Stop();
}

TEST(Pollers, OfOneNodeTakeTurns) {
  Pollers pollers(2, 1 << 20);
  pollers.ServeNics({NicAt("10.0.1.1", 1)}, {{0, {1023}}, {1, AllowedCores()}});
  const Pollers::Place first = pollers.Next("10.0.1.1"), second = pollers.Next("10.0.1.1");
  EXPECT_NE(first.poller, second.poller);
  EXPECT_EQ(first.pool, second.pool);
  EXPECT_EQ(pollers.Next("10.0.1.1").poller, first.poller);
  pollers.Stop();
}

}  // namespace
}  // namespace tcp
}  // namespace ps
