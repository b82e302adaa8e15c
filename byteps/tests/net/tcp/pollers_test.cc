// Where pollers run, and which of them connections get.
#include "byteps/net/tcp/pollers.h"

#include <gtest/gtest.h>

#include <future>
#include <set>
#include <string>

namespace ps {
namespace tcp {
namespace {

HostNic NicAt(const std::string& address, int numa) {
  HostNic nic;
  nic.name = "eth" + std::to_string(numa);
  nic.nic.address = address;
  nic.numa = numa;
  return nic;
}

// Of this machine's cores the first and the last.
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
  // Over no NIC: each has its turn.
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
