// Between which NICs the connections of two nodes go.
#include "byteps/net/link/nic_pairs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

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
      if (!pair.from.empty()) EXPECT_EQ(pair.from, pair.to);
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
      // The other rail next, and what the kernel chooses last.
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
  // Where one is not known all are alike.
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

// With one NIC a worker, workers begin with different ones of a server's.
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

}  // namespace
}  // namespace ps
