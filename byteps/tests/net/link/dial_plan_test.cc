// Tests of the pairs of NICs for connections, of when and where to dial, and of limits of outages.
#include "byteps/net/link/dial_plan.h"

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "byteps/net/link/dial_plan.h"
#include "byteps/net/link/link_outage.h"
#include "byteps/net/link/outage_watch.h"
#include "byteps/net/link/redial.h"

namespace ps {
namespace {

Nic Of(const std::string& address, int mbps = 100'000) { return {address, 24, mbps}; }

Node Server(const std::vector<Nic>& nics) {
  Node node;
  node.hostname = nics.empty() ? "server" : nics[0].address;
  node.nics = nics;
  return node;
}

std::map<std::string, int> CountFrom(const std::vector<std::vector<NicPair>>& plan) {
  std::map<std::string, int> count;
  for (const auto& tries : plan) ++count[tries.front().from];
  return count;
}

std::map<std::string, int> CountTo(const std::vector<std::vector<NicPair>>& plan) {
  std::map<std::string, int> count;
  for (const auto& tries : plan) ++count[tries.front().to];
  return count;
}

TEST(NicPairs, WithOneNicEachTheKernelChooses) {
  const auto plan = PairNics({Of("10.0.0.1")}, Server({Of("10.0.0.2")}), 2, 0);
  ASSERT_EQ(plan.size(), 2U);
  for (const auto& tries : plan) {
    EXPECT_EQ(tries, (std::vector<NicPair>{{"", "10.0.0.2"}}));
  }
  EXPECT_EQ(LeastConnections({Of("10.0.0.1")}, {Of("10.0.0.2")}), 1);
}

TEST(NicPairs, ANodeThatToldOfNoneHasItsName) {
  const auto plan = PairNics({Of("10.0.0.1"), Of("10.0.1.1")}, Server({}), 1, 0);
  EXPECT_EQ(plan[0], (std::vector<NicPair>{{"", "server"}}));
  EXPECT_EQ(LeastConnections({Of("10.0.0.1"), Of("10.0.1.1")}, {}), 1);
}

TEST(NicPairs, WithinAHostEachNicGoesWithItself) {
  const std::vector<Nic> nics = {Of("10.0.0.1"), Of("10.0.0.2"), Of("10.0.0.3")};
  const auto plan = PairNics(nics, Server({nics[2], nics[0]}), 2, 0);
  for (const auto& tries : plan) {
    for (const NicPair& pair : tries) {
      if (!pair.from.empty()) {
        EXPECT_EQ(pair.from, pair.to);
      }
    }
  }
  EXPECT_EQ(CountFrom(plan), (std::map<std::string, int>{{"10.0.0.1", 1}, {"10.0.0.3", 1}}));
}

TEST(NicPairs, EachSubnetIsOneRail) {
  const std::vector<Nic> worker = {Of("10.0.0.1"), Of("10.0.1.1")};
  const std::vector<Nic> server = {Of("10.0.1.2"), Of("10.0.0.2")};
  for (int turn = 0; turn < 4; ++turn) {
    const auto plan = PairNics(worker, Server(server), 2, turn);
    std::set<std::string> pairs;
    for (const auto& tries : plan) {
      pairs.insert(tries[0].from + " " + tries[0].to);
      // The NIC of the other rail comes second, and the kernel's choice last.
      ASSERT_EQ(tries.size(), 3U);
      EXPECT_NE(tries[1].from, tries[0].from);
      EXPECT_NE(tries[1].to, tries[0].to);
      EXPECT_EQ(tries[2], (NicPair{"", server[0].address}));
    }
    EXPECT_EQ(pairs, (std::set<std::string>{"10.0.0.1 10.0.0.2", "10.0.1.1 10.0.1.2"}));
  }
}

TEST(NicPairs, InOneSubnetConnectionsAvoidEachOther) {
  const std::vector<Nic> worker = {Of("10.0.0.1"), Of("10.0.0.2")};
  const std::vector<Nic> server = {Of("10.0.0.3"), Of("10.0.0.4")};
  for (int turn = 0; turn < 4; ++turn) {
    const auto plan = PairNics(worker, Server(server), 2, turn);
    EXPECT_EQ(CountFrom(plan).size(), 2U);
    EXPECT_EQ(CountTo(plan).size(), 2U);
    for (const auto& tries : plan) {
      EXPECT_NE(tries[1].from, tries[0].from) << "whichever NIC fails, the next is another";
      EXPECT_NE(tries[1].to, tries[0].to);
    }
  }
}

TEST(NicPairs, RoutedSubnetsArePairedToo) {
  const auto plan =
      PairNics({Of("10.1.0.1"), Of("10.1.1.1")}, Server({Of("10.2.0.1"), Of("10.2.1.1")}), 2, 0);
  EXPECT_EQ(CountFrom(plan).size(), 2U);
  EXPECT_EQ(CountTo(plan).size(), 2U);
}

TEST(NicPairs, RatesShareTheConnections) {
  const std::vector<Nic> worker = {Of("10.0.0.1", 300'000), Of("10.0.0.2", 100'000)};
  const auto plan = PairNics(worker, Server({Of("10.0.0.9", 400'000)}), 8, 3);
  EXPECT_EQ(CountFrom(plan), (std::map<std::string, int>{{"10.0.0.1", 6}, {"10.0.0.2", 2}}));
  // If a NIC's rate is unknown, all NICs count as equal.
  const std::vector<Nic> unknown = {Of("10.0.0.1", 300'000), Of("10.0.0.2", 0)};
  const auto even = PairNics(unknown, Server({Of("10.0.0.9", 400'000)}), 8, 3);
  EXPECT_EQ(CountFrom(even), (std::map<std::string, int>{{"10.0.0.1", 4}, {"10.0.0.2", 4}}));
}

TEST(NicPairs, OneNicServesAllOfThePeers) {
  const std::vector<Nic> server = {Of("10.0.0.2"), Of("10.0.0.3"), Of("10.0.0.4"), Of("10.0.0.5")};
  EXPECT_EQ(LeastConnections({Of("10.0.0.1")}, server), 4);
  const auto plan = PairNics({Of("10.0.0.1")}, Server(server), 4, 1);
  EXPECT_EQ(CountTo(plan).size(), 4U);
}

// Workers with one NIC each start with different NICs of a server.
TEST(NicPairs, TurnsBeginElsewhere) {
  std::set<std::string> firsts;
  for (int turn = 0; turn < 2; ++turn) {
    const auto plan = PairNics({Of("10.0.0.1")}, Server({Of("10.0.0.2"), Of("10.0.0.3")}), 1, turn);
    firsts.insert(plan[0][0].to);
  }
  EXPECT_EQ(firsts.size(), 2U);
}

TEST(NicPairs, AConnectionTriesNoMoreThanAFew) {
  std::vector<Nic> worker, server;
  for (int i = 0; i < 8; ++i) {
    worker.push_back(Of("10.0.0." + std::to_string(10 + i)));
    server.push_back(Of("10.0.0." + std::to_string(20 + i)));
  }
  const auto plan = PairNics(worker, Server(server), 8, 0);
  EXPECT_EQ(CountFrom(plan).size(), 8U);
  EXPECT_EQ(CountTo(plan).size(), 8U);
  std::set<std::string> seconds;
  for (const auto& tries : plan) {
    EXPECT_LE(tries.size(), 9U);
    EXPECT_EQ(tries.back(), (NicPair{"", "10.0.0.20"}));
    seconds.insert(tries[1].from);
  }
  EXPECT_GE(seconds.size(), 4U) << "what leaves a NIC goes to several";
}

TEST(NicPairs, SubnetsOfIPv6) {
  const std::vector<Nic> worker = {{"fd00:1::1", 64, 0}, {"fd00:2::1", 64, 0}};
  const auto plan = PairNics(worker, Server({{"fd00:2::2", 64, 0}, {"fd00:1::2", 64, 0}}), 2, 0);
  for (const auto& tries : plan) {
    EXPECT_EQ(tries[0].from.substr(0, 6), tries[0].to.substr(0, 6));
  }
}

// ----- addresses and times of a connection's attempts

using std::chrono::milliseconds;

const DialPlan::Clock::time_point kStart{};
constexpr milliseconds kFirstPause{20};
constexpr milliseconds kLongestPause{500};

TEST(DialPlan, ALoneAddressIsTriedAgainAfterAPause) {
  DialPlan plan(kFirstPause, kLongestPause);
  plan.Begin({{"", "127.0.0.1"}}, 1234, kStart + std::chrono::seconds(5));
  EXPECT_EQ(plan.Current().to.Text(), "127.0.0.1:1234");
  for (const int ms : {20, 40, 80, 160, 320, 500, 500}) {
    EXPECT_EQ(plan.Failed("refused", true, kStart), kStart + milliseconds(ms));
  }
  EXPECT_EQ(plan.redial().last_error(), "refused");
  EXPECT_EQ(plan.deadline(), kStart + std::chrono::seconds(5));
}

TEST(DialPlan, OfALinkThatBrokeNothingIsKnown) {
  DialPlan plan(kFirstPause, kLongestPause);
  plan.Begin({{"", "127.0.0.1"}}, 1234, kStart);
  plan.Failed("refused", true, kStart);
  plan.Restart(false);
  EXPECT_FALSE(plan.redial().nobody_listens());
  EXPECT_EQ(plan.Failed("refused", true, kStart), kStart + milliseconds(20));
  plan.Succeeded(kStart);
  EXPECT_FALSE(plan.redial().nobody_listens());
}

// The numbers tell timers and sockets of an earlier attempt apart from those of the current one.
TEST(DialPlan, EachAttemptHasANumber) {
  DialPlan plan(kFirstPause, kLongestPause);
  plan.Begin({{"", "127.0.0.1"}}, 1234, kStart);
  const uint64_t first = plan.attempt();
  plan.NextAttempt();
  const uint64_t second = plan.attempt();
  plan.Failed("refused", true, kStart);
  EXPECT_NE(first, second);
  EXPECT_NE(second, plan.attempt());
}

// Returns a plan of two NICs and the kernel's choice.
DialPlan PlanOfPairs() {
  DialPlan plan(kFirstPause, kLongestPause);
  plan.Begin({{"127.0.0.1", "127.0.0.1"}, {"127.0.0.2", "127.0.0.2"}, {"", "127.0.0.1"}}, 1234,
             kStart);
  return plan;
}

TEST(DialPlan, PairsAreTriedOneAfterAnotherBeforeAPause) {
  DialPlan plan = PlanOfPairs();
  EXPECT_EQ(plan.Current().Text(), "127.0.0.1 to 127.0.0.1:1234");
  EXPECT_FALSE(plan.is_away());
  EXPECT_EQ(plan.Failed("no answer", false, kStart), kStart);
  EXPECT_EQ(plan.Current().Text(), "127.0.0.2 to 127.0.0.2:1234");
  EXPECT_TRUE(plan.is_away());
  EXPECT_EQ(plan.home().Text(), "127.0.0.1 to 127.0.0.1:1234");
  EXPECT_EQ(plan.Failed("no answer", false, kStart), kStart);
  EXPECT_EQ(plan.Current().Text(), "127.0.0.1:1234");
  EXPECT_EQ(plan.Failed("no answer", false, kStart), kStart + milliseconds(20));
  EXPECT_FALSE(plan.is_away());
}

// The peer is alive but not ready, so another pair of NICs would not help.
TEST(DialPlan, APeerThatAsksForPatienceIsTriedOverTheSamePair) {
  DialPlan plan = PlanOfPairs();
  plan.Failed("no answer", false, kStart);
  EXPECT_EQ(plan.Current().from, "127.0.0.2");
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(plan.Postponed("not yet", kStart), kStart + milliseconds(20));
    EXPECT_EQ(plan.Current().from, "127.0.0.2");
  }
}

TEST(DialPlan, OfASilentPairAnotherIsTriedFirst) {
  DialPlan plan = PlanOfPairs();
  plan.Restart(false);
  EXPECT_FALSE(plan.is_away());
  plan.Restart(true);
  EXPECT_EQ(plan.Current().from, "127.0.0.2");
  // A round ends when each pair was tried.
  EXPECT_EQ(plan.Failed("no answer", false, kStart), kStart);
  EXPECT_EQ(plan.Failed("no answer", false, kStart), kStart);
  EXPECT_EQ(plan.Current().from, "127.0.0.1");
  EXPECT_EQ(plan.Failed("no answer", false, kStart), kStart + milliseconds(20));
  plan.GoHome();
  EXPECT_FALSE(plan.is_away());
}

TEST(DialPlan, ItLooksLessOftenWhileThePairFailsAgain) {
  DialPlan plan = PlanOfPairs();
  const auto look = [&](std::chrono::seconds home_for) {
    const auto begin = kStart + std::chrono::hours(1);
    plan.GoHome();
    plan.Succeeded(begin);
    plan.Restart(true);
    plan.Succeeded(begin + home_for);
    return plan.NextLook();
  };
  EXPECT_EQ(look(std::chrono::seconds(1)), std::chrono::seconds(1));
  EXPECT_EQ(look(std::chrono::seconds(1)), std::chrono::seconds(2));
  EXPECT_EQ(look(std::chrono::seconds(1)), std::chrono::seconds(4));
  EXPECT_EQ(look(std::chrono::seconds(100)), std::chrono::seconds(1)) << "it has lasted";
  for (int i = 0; i < 10; ++i) plan.NextLook();
  EXPECT_EQ(plan.NextLook(), std::chrono::seconds(64));
}

TEST(DialPlan, PairsThatAreAddedAreAsGoodAsTheFirst) {
  DialPlan plan(kFirstPause, kLongestPause);
  plan.Begin({{"", "127.0.0.1"}}, 1234, kStart);
  EXPECT_FALSE(plan.has_several_pairs());
  plan.Add({{"127.0.0.2", "127.0.0.2"}, {"", "127.0.0.1"}});
  EXPECT_TRUE(plan.has_several_pairs());
  plan.Restart(true);
  EXPECT_EQ(plan.Current().Text(), "127.0.0.2 to 127.0.0.2:1234");
  EXPECT_FALSE(plan.is_away());
  plan.Restart(true);
  EXPECT_EQ(plan.Current().Text(), "127.0.0.1:1234") << "what was there already is there once";
}

// ----- when the next attempt is made, and when there is none

TEST(Redial, AListenerIsGoneWhenNobodyHasListenedForAWhile) {
  Redial redial(milliseconds(20), milliseconds(70));
  redial.Failed("refused", true, kStart);
  EXPECT_TRUE(redial.nobody_listens());
  EXPECT_FALSE(redial.IsListenerGone(kStart)) << "it may be about to listen again";
  redial.Failed("refused", true, kStart + kListenerGoneTime / 2);
  EXPECT_TRUE(redial.IsListenerGone(kStart + kListenerGoneTime));
}

TEST(Redial, WhateverElseIsHeardShowsThatItIsThere) {
  Redial redial(milliseconds(20), milliseconds(70));
  redial.Failed("refused", true, kStart);
  redial.Failed("no answer", false, kStart + kListenerGoneTime / 2);
  EXPECT_FALSE(redial.IsListenerGone(kStart + kListenerGoneTime));
  redial.Failed("refused", true, kStart + kListenerGoneTime);
  EXPECT_FALSE(redial.IsListenerGone(kStart + kListenerGoneTime)) << "the time begins anew";
  redial.Succeeded();
  EXPECT_FALSE(redial.nobody_listens());
}

// A second outage must not report the error of the first.
TEST(Redial, ALinkThatBreaksAgainForgetsWhatWasBefore) {
  Redial redial(milliseconds(20), milliseconds(70));
  redial.Failed("refused", true, kStart);
  EXPECT_EQ(redial.last_error(), "refused");
  redial.Begin();
  EXPECT_EQ(redial.last_error(), "");
  EXPECT_FALSE(redial.IsListenerGone(kStart + kListenerGoneTime));
}

// ----- time limit of a broken link, over any number of connections

using std::chrono::seconds;
using Clock = OutageWatch::Clock;

constexpr double kReconnectS = 30;
const Clock::duration kNone = Clock::duration::zero();

class OutageWatchTest : public testing::Test {
 protected:
  bool Break(Clock::duration patience, Clock::duration counted = kNone) {
    return watch_.Begin("it broke", LinkFault::kBroken, true, patience, counted);
  }
  // Returns the seconds until the deadline.
  int64_t Left() const {
    return std::chrono::round<seconds>(watch_.deadline() - Clock::now()).count();
  }

  OutageWatch watch_{kReconnectS};
};

TEST_F(OutageWatchTest, ThePatienceIsLessWhatHasPassedInSilence) {
  EXPECT_TRUE(Break(seconds(30), seconds(15)));
  EXPECT_EQ(Left(), 15);
  EXPECT_TRUE(watch_.lasts());
  EXPECT_EQ(watch_.number(), 1u);
}

// The scheduler gives a lost node 5 s. A node that has reconnected is alive, and gets the full time
// to send the missing messages.
TEST_F(OutageWatchTest, APeerThatIsThereAgainHasAllTheTime) {
  Break(seconds(5));
  EXPECT_EQ(Left(), 5);
  watch_.AwaitProof(3);
  EXPECT_EQ(Left(), 30);
  EXPECT_EQ(watch_.again(), 3u);
  EXPECT_LT(watch_.End(), seconds(1));
  EXPECT_FALSE(watch_.lasts());
  EXPECT_FALSE(watch_.awaits_proof());
}

// If a path carries greetings but nothing larger, every connection is made and then breaks. Even
// so, the outage must end at its deadline.
TEST_F(OutageWatchTest, AConnectionThatProvesNothingDoesNotEndIt) {
  EXPECT_TRUE(Break(seconds(10)));
  watch_.AwaitProof(1);
  const auto deadline = watch_.deadline();
  for (int n = 0; n < 5; ++n) {
    EXPECT_FALSE(Break(seconds(30))) << "the same deadline";
    EXPECT_EQ(watch_.deadline(), deadline);
    watch_.AwaitProof(1);
    EXPECT_EQ(watch_.deadline(), deadline);
  }
  EXPECT_EQ(watch_.number(), 1u);
  // If a connection had proved that it works, its break starts a new outage.
  watch_.End();
  EXPECT_TRUE(Break(seconds(60)));
  EXPECT_GT(watch_.deadline(), deadline);
}

TEST_F(OutageWatchTest, AnEarlierDeadlineCounts) {
  EXPECT_TRUE(Break(seconds(30)));
  watch_.AwaitProof(0);
  EXPECT_TRUE(Break(seconds(5))) << "of a peer that has ended, it seems";
  EXPECT_EQ(Left(), 5);
  EXPECT_EQ(watch_.number(), 2u);
}

// A slow link (5 kB/s) needs several connections for one message. Progress on each of them keeps
// the link alive.
TEST_F(OutageWatchTest, WhatCameOverTheLastConnectionCounts) {
  Break(seconds(5), seconds(3));
  watch_.AwaitProof(1);
  EXPECT_EQ(Left(), 27);
  EXPECT_FALSE(Break(seconds(30)));
  watch_.HearProofOfTheLast();
  watch_.AwaitProof(1);
  EXPECT_EQ(Left(), 30);
}

TEST_F(OutageWatchTest, NothingIsProvedOfAnOutageThatBegins) {
  Break(seconds(5), seconds(3));
  watch_.HearProofOfTheLast();  // there was no earlier outage
  watch_.AwaitProof(1);
  EXPECT_EQ(Left(), 27);
}

TEST_F(OutageWatchTest, AConnectionThatIsThereSinceAMomentHasItsChance) {
  Break(seconds(30));
  watch_.AwaitProof(0);
  const auto chance = watch_.ChanceUntil();
  EXPECT_EQ(std::chrono::round<seconds>(chance - Clock::now()), seconds(5));
  watch_.PostponeTo(chance);
  EXPECT_EQ(Left(), 5);
  OutageWatch impatient{2};
  impatient.Begin("it broke", LinkFault::kBroken, true, seconds(2), kNone);
  impatient.AwaitProof(0);
  EXPECT_LE(impatient.ChanceUntil() - Clock::now(), milliseconds(500));
}

TEST_F(OutageWatchTest, SaysWhatWasNotAcknowledged) {
  Break(seconds(30));
  watch_.AwaitProof(1);
  watch_.NoteUnacknowledged(5000);
  watch_.NoteUnacknowledged(100);
  EXPECT_FALSE(Break(seconds(30)));
  EXPECT_NE(watch_.GivenUp(false, "").find("of 5000 bytes"), std::string::npos);
  EXPECT_EQ(watch_.GivenUp(true, "nobody listens"), "it broke");
  watch_.End();
  EXPECT_TRUE(Break(seconds(30)));
  EXPECT_EQ(watch_.GivenUp(false, "").find("acknowledged"), std::string::npos);
}

// The side that waits for answers gives up first, although it has sent no message itself.
TEST_F(OutageWatchTest, OneThatIsRefusedSaysWhatWasNotAcknowledged) {
  Break(seconds(30));
  watch_.AwaitProof(1);
  EXPECT_EQ(watch_.Refused("it was refused"), "it was refused");
  watch_.NoteUnacknowledged(5000);
  const std::string text = watch_.Refused("it was refused");
  EXPECT_EQ(text.find("it was refused; of 5000 bytes"), 0u) << text;
  EXPECT_NE(text.find("compare the MTU"), std::string::npos) << text;
}

}  // namespace
}  // namespace ps
