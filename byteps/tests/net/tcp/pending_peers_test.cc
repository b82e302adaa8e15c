// Which of too many unauthenticated connections is closed.
#include "byteps/net/tcp/pending_peers.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <vector>

namespace ps {
namespace tcp {
namespace {

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
  // The timers run in this order.
  std::promise<void> later;
  poller_->At(Poller::Clock::now() + std::chrono::milliseconds(60), [&] { later.set_value(); });
  later.get_future().wait();
  for (const auto& peer : peers) {
    EXPECT_EQ(peer->ended, "late");
    EXPECT_FALSE(peer->reset);
  }
}

}  // namespace
}  // namespace tcp
}  // namespace ps
