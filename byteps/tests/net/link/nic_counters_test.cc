// What counts at which NIC.
#include "byteps/net/link/nic_counters.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "byteps/net/link/nics.h"
#include "byteps/observe/metrics.h"

namespace ps {
namespace {

NicReading Reading(const std::string& nic) {
  const auto readings = ReadNicCounters();
  const auto found = std::find_if(readings.begin(), readings.end(),
                                  [&](const NicReading& one) { return one.nic == nic; });
  return found == readings.end() ? NicReading() : *found;
}

TEST(NicCounters, AreThoseOfTheInterfaceWithTheAddress) {
  for (const HostNic& nic : ListNics()) {
    EXPECT_EQ(CountersOfNic(nic.nic.address, "203.0.113.7")->nic, nic.name);
    EXPECT_EQ(InterfaceOf(nic.nic.address), nic.name);
  }
  EXPECT_EQ(CountersOfNic("203.0.113.9", "203.0.113.7")->nic, "unknown");
}

TEST(NicCounters, WhatStaysInTheHostGoesOverLoopback) {
  for (const HostNic& nic : ListNics()) {
    EXPECT_EQ(CountersOfNic(nic.nic.address, nic.nic.address)->nic, "lo");
  }
  EXPECT_EQ(CountersOfNic("127.0.0.1", "127.0.0.2")->nic, "lo");
}

TEST(NicCounters, ConnectionsOverANicShareThem) {
  NicCounters* const counters = CountersOfNic("127.0.0.1", "127.0.0.1");
  EXPECT_EQ(CountersOfNic("127.0.0.1", "127.0.0.2"), counters);
  const NicReading before = Reading("lo");
  counters->bytes_sent += 5;
  counters->bytes_received += 7;
  EXPECT_EQ(Reading("lo").bytes_sent, before.bytes_sent + 5);
  EXPECT_EQ(Reading("lo").bytes_received, before.bytes_received + 7);
}

TEST(NicCounters, AreMetricsWithTheNicAsALabel) {
  const auto metrics = byteps::core::Tell({NicReading{"eth0", 1, 2}, NicReading{"eth1", 3, 4}});
  ASSERT_EQ(metrics.size(), 4U);
  static const char* const kNames[] = {"byteps_nic_sent_bytes_total",
                                       "byteps_nic_received_bytes_total"};
  static const double kValues[] = {1, 3, 2, 4};
  for (size_t i = 0; i < metrics.size(); ++i) {
    EXPECT_EQ(metrics[i].name, kNames[i / 2]);
    ASSERT_EQ(metrics[i].labels.size(), 1U);
    EXPECT_EQ(metrics[i].labels[0].first, "nic");
    EXPECT_EQ(metrics[i].labels[0].second, i % 2 == 0 ? "eth0" : "eth1");
    EXPECT_EQ(metrics[i].value, kValues[i]);
  }
}

}  // namespace
}  // namespace ps
