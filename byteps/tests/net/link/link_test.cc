// Tests of the parts of a link: limits of outages, a message's meta on the wire, the replay log,
// receipts, and idle blocks.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "byteps/net/link/admission.h"
#include "byteps/net/link/idle_blocks.h"
#include "byteps/net/link/link_outage.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/link/nics.h"
#include "byteps/net/link/receipts.h"
#include "byteps/net/link/replay_log.h"
#include "byteps/net/tcp/van.h"
#include "ps/internal/message.h"

namespace ps {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(IsLoopback, AddressesOfThisHostAlone) {
  for (const char* host : {"127.0.0.1", "127.255.0.3", "::1", "localhost"}) {
    EXPECT_TRUE(IsLoopback(host)) << host;
  }
  for (const char* host : {"128.0.0.1", "10.0.0.127", "fe80::1", "127.example.org", ""}) {
    EXPECT_FALSE(IsLoopback(host)) << host;
  }
}

TEST(ConnectionsFor, AsManyAsTheLinkWants) {
  EXPECT_EQ(tcp::ConnectionsFor(10, 1, 8), 1);
  EXPECT_EQ(tcp::ConnectionsFor(10.1, 1, 8), 2);
  EXPECT_EQ(tcp::ConnectionsFor(25, 2, 8), 2);
  EXPECT_EQ(tcp::ConnectionsFor(25, 4, 8), 1);
  EXPECT_EQ(tcp::ConnectionsFor(100, 4, 8), 3);
  EXPECT_EQ(tcp::ConnectionsFor(100, 1000, 8), 1);
}

TEST(ConnectionsFor, NoneWaitsForTheThreadOfAnother) {
  EXPECT_EQ(tcp::ConnectionsFor(400, 1, 8), 8);
  EXPECT_EQ(tcp::ConnectionsFor(100, 1, 1), 1);
  EXPECT_EQ(tcp::ConnectionsFor(1e6, 1, 3), 3);
}

TEST(LinkPatience, TheSchedulerAloneMustHearSoonOfAProcessThatEnded) {
  EXPECT_EQ(LinkPatience(9, false, 30, LinkFault::kClosed), seconds(30));
  EXPECT_EQ(LinkPatience(9, true, 30, LinkFault::kClosed), milliseconds(500));
  EXPECT_EQ(LinkPatience(9, true, 30, LinkFault::kBroken), seconds(5));
  EXPECT_EQ(LinkPatience(9, true, 30, LinkFault::kSilent), seconds(30));
}

TEST(LinkPatience, IsNeverLongerThanSaid) {
  for (const bool is_scheduler : {false, true}) {
    for (const auto fault : {LinkFault::kClosed, LinkFault::kBroken, LinkFault::kSilent}) {
      EXPECT_EQ(LinkPatience(9, is_scheduler, 0.25, fault), milliseconds(250));
      EXPECT_EQ(LinkPatience(9, is_scheduler, 0, fault), seconds(0));
    }
  }
}

TEST(LinkPatience, NobodyWaitsForWhoIsNotOfTheJob) {
  EXPECT_EQ(LinkPatience(Node::kEmpty, true, 30, LinkFault::kSilent), seconds(0));
  EXPECT_EQ(LinkPatience(kRefusedBase, true, 30, LinkFault::kSilent), seconds(0));
}

TEST(LinkOutage, SaysHowLongWhereTheTimeWasTheReason) {
  auto outage = LinkOutage::Of("its connection was reset", LinkFault::kBroken, seconds(2), 2);
  EXPECT_EQ(outage.GivenUp(2, "no answer"),
            "its connection was reset, and could not be made again within 2.0 s "
            "(BYTEPS_RECONNECT_TIMEOUT_S=2): no answer");
  outage.listener_gone = true;  // the process has ended; nothing else to report
  EXPECT_EQ(outage.GivenUp(2, "nobody listens there"), "its connection was reset");
  outage = LinkOutage::Of(kLinkClosed, LinkFault::kClosed, milliseconds(500), 30);
  EXPECT_EQ(outage.GivenUp(30, ""), kLinkClosed);
  outage = LinkOutage::Of("it broke", LinkFault::kBroken, seconds(5), 30);
  EXPECT_EQ(outage.GivenUp(30, ""), "it broke, and it did not connect again");
}

TEST(LinkOutage, SaysThatLargePacketsVanish) {
  auto outage = LinkOutage::Of("its connection timed out", LinkFault::kSilent, seconds(2), 2);
  outage.unacknowledged = 5000;
  const std::string text = outage.GivenUp(2, "");
  EXPECT_NE(text.find("of 5000 bytes that were sent since none was acknowledged within 2.0 s "
                      "(BYTEPS_RECONNECT_TIMEOUT_S=2): small packets pass"),
            std::string::npos)
      << text;
  outage.unacknowledged = 16;  // too few bytes to suspect large packets
  EXPECT_EQ(outage.GivenUp(2, ""),
            "its connection timed out, and was made again, but of 16 bytes that were sent since "
            "none was acknowledged within 2.0 s (BYTEPS_RECONNECT_TIMEOUT_S=2)");
  // The last attempt failed with an error of its own.
  EXPECT_EQ(outage.GivenUp(2, "no answer"),
            "its connection timed out, and could not be made again within 2.0 s "
            "(BYTEPS_RECONNECT_TIMEOUT_S=2): no answer");
}

}  // namespace
}  // namespace ps

namespace byteps {
namespace core {
namespace {

// ----- a message's meta on the wire

// Fills memory. The asm keeps the compiler from dropping the fill before an object is constructed.
void Leave(char value, char* memory, size_t bytes) {
  memset(memory, value, bytes);
  asm volatile("" : : "r"(memory) : "memory");
}

// Encodes a meta constructed in memory with old bytes. `fill` sets the members that a sender sets.
template <typename Fill>
std::string EncodedFrom(char left_there, Fill fill) {
  alignas(ps::Meta) char memory[sizeof(ps::Meta)];
  Leave(left_there, memory, sizeof(memory));
  auto* const meta = new (memory) ps::Meta;
  fill(meta, left_there);
  std::string bytes = ps::EncodeMeta(*meta);
  meta->~Meta();
  return bytes;
}

ps::Node NodeFrom(char left_there) {
  alignas(ps::Node) char memory[sizeof(ps::Node)];
  Leave(left_there, memory, sizeof(memory));
  auto* const node = new (memory) ps::Node;
  ps::Node copy = *node;
  node->~Node();
  copy.id = 9;
  copy.port = 1234;
  copy.hostname = "host";
  copy.endpoint_name_len = 8;  // the sender wrote none of these bytes
  return copy;
}

// The wire must not leak the sender's memory: equal messages give equal bytes, even if members are
// unset.
TEST(Meta, SendsNothingThatNobodyWrote) {
  const auto heartbeat = [](ps::Meta* meta, char) {
    meta->control.cmd = ps::Control::HEARTBEAT;
    meta->body = "report";
  };
  EXPECT_EQ(EncodedFrom('\xa5', heartbeat), EncodedFrom('\x5a', heartbeat));
  const auto add_node = [](ps::Meta* meta, char left_there) {
    meta->control.cmd = ps::Control::ADD_NODE;
    meta->control.node.push_back(NodeFrom(left_there));
  };
  EXPECT_EQ(EncodedFrom('\xa5', add_node), EncodedFrom('\x5a', add_node));
}

ps::Meta WithNics(const std::vector<ps::Nic>& nics) {
  ps::Meta meta;
  meta.control.cmd = ps::Control::ADD_NODE;
  ps::Node node;
  node.id = 8;
  node.port = 1234;
  node.hostname = "10.0.0.2";
  node.nics = nics;
  meta.control.node = {node, node};
  return meta;
}

TEST(Meta, TellsOfTheNicsOfANode) {
  const std::string bytes =
      ps::EncodeMeta(WithNics({{"10.0.0.2", 24, 100'000}, {"fd00::2", 64, 0}}));
  ps::Meta meta;
  ASSERT_TRUE(ps::DecodeMeta(bytes.data(), bytes.size(), &meta));
  ASSERT_EQ(meta.control.node.size(), 2U);
  const auto& nics = meta.control.node[1].nics;
  ASSERT_EQ(nics.size(), 2U);
  EXPECT_EQ(nics[0].address, "10.0.0.2");
  EXPECT_EQ(nics[0].prefix, 24);
  EXPECT_EQ(nics[0].mbps, 100'000);
  EXPECT_EQ(nics[1].address, "fd00::2");
  EXPECT_EQ(nics[1].prefix, 64);
  EXPECT_EQ(nics[1].mbps, 0);
}

TEST(Meta, RefusesNicsThatCannotBe) {
  for (const ps::Nic& nic : {ps::Nic{"", 24, 0}, ps::Nic{"10.0.0.2 ", 24, 0},
                             ps::Nic{"10.0.0.2", 129, 0}, ps::Nic{"10.0.0.2", 24, -1}}) {
    const std::string bytes = ps::EncodeMeta(WithNics({nic}));
    ps::Meta meta;
    EXPECT_FALSE(ps::DecodeMeta(bytes.data(), bytes.size(), &meta)) << nic.address;
  }
  // The sender leaves out NICs beyond the limit.
  const std::string bytes = ps::EncodeMeta(WithNics(std::vector<ps::Nic>(99, {"10.0.0.2", 24, 0})));
  ps::Meta meta;
  ASSERT_TRUE(ps::DecodeMeta(bytes.data(), bytes.size(), &meta));
  EXPECT_EQ(meta.control.node[0].nics.size(), ps::kMostNics);
}

}  // namespace
}  // namespace core
}  // namespace byteps

namespace ps {
namespace {

// ----- messages that are sent again over a link that broke

using Message = std::unique_ptr<int>;
using Log = ReplayLog<Message>;

void Add(Log* log, const std::vector<int>& numbers) {
  for (const int n : numbers) log->Add(std::make_unique<int>(n));
}

template <typename List>
std::vector<int> NumbersOf(const List& list) {
  std::vector<int> numbers;
  for (const auto& message : list) numbers.push_back(*message);
  return numbers;
}

using Numbers = std::vector<int>;

TEST(ReplayLog, OnlyWhatThePeerLacksIsSentAgain) {
  Log log;
  std::vector<Message> arrived;
  Add(&log, {0, 1, 2, 3, 4});
  log.Arrived(1, &arrived);
  EXPECT_EQ(NumbersOf(arrived), Numbers({0}));
  const auto again = log.Resume(3, &arrived);  // two more had arrived without an acknowledgement
  EXPECT_EQ(NumbersOf(arrived), Numbers({0, 1, 2}));
  EXPECT_EQ(NumbersOf(again), Numbers({3, 4}));
  EXPECT_TRUE(log.empty());
  EXPECT_EQ(log.sent(), 3u);
}

// A peer that miscounts would lose a message silently, or get a message twice.
TEST(ReplayLog, WhatCannotBeIsSaidAndChangesNothing) {
  Log log;
  std::vector<Message> arrived;
  Add(&log, {0, 1, 2, 3, 4});
  log.Arrived(4, &arrived);
  for (const uint64_t impossible : {6, 3}) {  // more than were sent; fewer than acknowledged before
    EXPECT_THROW(log.Arrived(impossible, &arrived), Error);
    EXPECT_THROW(log.Resume(impossible, &arrived), Error);
  }
  EXPECT_EQ(arrived.size(), 4u);
  EXPECT_EQ(NumbersOf(log.Resume(4, &arrived)), Numbers({4}));
}

// A device completes a small message before the values of an earlier one; the next device does not.
TEST(ReplayLog, AnotherOrderOverTheNextLink) {
  Log log;
  std::vector<Message> arrived;
  Add(&log, {0, 1, 2});
  auto again = log.Resume(1, &arrived);
  for (auto it = again.rbegin(); it != again.rend(); ++it) log.Add(std::move(*it));
  EXPECT_EQ(NumbersOf(log.Resume(2, &arrived)), Numbers({1}));
  EXPECT_EQ(NumbersOf(arrived), Numbers({0, 2}));
}

TEST(ReplayLog, WhatIsInFlightIsTakenWhereALinkEnds) {
  Log log;
  std::vector<Message> arrived;
  Add(&log, {0, 1, 2});
  log.Arrived(1, &arrived);
  EXPECT_EQ(NumbersOf(log.TakeAll()), Numbers({1, 2}));
  EXPECT_TRUE(log.empty());
}

// Sender and receiver over a link that delivers in order and breaks at random. The sender learns of
// a random part of the messages that have arrived.
TEST(ReplayLog, EachComesOnceAndInOrderHoweverOftenItBreaks) {
  std::mt19937 random(7);
  for (int run = 0; run < 300; ++run) {
    const int count = 1 + static_cast<int>(random() % 60);
    std::deque<Message> outbox;
    for (int n = 0; n < count; ++n) outbox.push_back(std::make_unique<int>(n));
    Log log;
    std::vector<Message> arrived;
    std::deque<int> link;  // messages in flight
    std::vector<int> received;
    while (received.size() < static_cast<size_t>(count)) {
      const auto what = random() % 4;
      if (what == 0 && !outbox.empty()) {
        link.push_back(*outbox.front());
        log.Add(std::move(outbox.front()));
        outbox.pop_front();
      } else if (what == 1 && !link.empty()) {
        received.push_back(link.front());
        link.pop_front();
      } else if (what == 2) {
        const uint64_t unheard = received.size() - log.arrived();
        log.Arrived(log.arrived() + random() % (unheard + 1), &arrived);
      } else if (what == 3 && random() % 4 == 0) {
        link.clear();
        auto again = log.Resume(received.size(), &arrived);
        for (auto it = again.rbegin(); it != again.rend(); ++it) {
          outbox.push_front(std::move(*it));
        }
      }
    }
    for (int n = 0; n < count; ++n) ASSERT_EQ(received[n], n) << "run " << run;
    log.Arrived(count, &arrived);
    EXPECT_EQ(arrived.size(), static_cast<size_t>(count)) << "each is let go of once";
  }
}

// ----- when received messages are acknowledged

using Tell = Receipts::Tell;

TEST(Receipts, NothingIsToldWhereNothingCame) {
  Receipts receipts;
  EXPECT_EQ(receipts.Next(), Tell::kNothing);
  receipts.Came(100);
  receipts.Told(receipts.received());  // by a frame that was sent anyway
  EXPECT_EQ(receipts.Next(), Tell::kNothing);
}

TEST(Receipts, FewBytesAreToldSoonAndByOneFrame) {
  Receipts receipts;
  receipts.Came(100);
  EXPECT_EQ(receipts.Next(), Tell::kSoon);
  receipts.Came(100);
  EXPECT_EQ(receipts.Next(), Tell::kNothing) << "a frame is planned";
  EXPECT_TRUE(receipts.IsDue());
  receipts.Told(receipts.received());
  EXPECT_EQ(receipts.Next(), Tell::kNothing);
  receipts.Came(100);
  EXPECT_EQ(receipts.Next(), Tell::kSoon);
}

TEST(Receipts, WhatWasToldMeanwhileIsNotDue) {
  Receipts receipts;
  receipts.Came(100);
  EXPECT_EQ(receipts.Next(), Tell::kSoon);
  receipts.Told(1);
  EXPECT_FALSE(receipts.IsDue());
}

TEST(Receipts, ManyBytesOrMessagesAreToldAtOnce) {
  Receipts large;
  large.Came(Receipts::kManyBytes);
  EXPECT_EQ(large.Next(), Tell::kNow);
  Receipts many;
  for (uint64_t n = 0; n < Receipts::kManyMessages; ++n) many.Came(1);
  EXPECT_EQ(many.Next(), Tell::kNow);
}

TEST(Receipts, WhatWasToldAtOnceCountsNoMore) {
  Receipts receipts;
  receipts.Came(Receipts::kManyBytes);
  EXPECT_EQ(receipts.Next(), Tell::kNow);
  receipts.Told(1);
  receipts.Came(1);
  EXPECT_EQ(receipts.Next(), Tell::kSoon);
}

// If this acknowledgement waited for the planned frame, a sender without room would wait, too.
TEST(Receipts, ManyAreToldAtOnceThoughAFrameIsPlanned) {
  Receipts receipts;
  receipts.Came(1);
  EXPECT_EQ(receipts.Next(), Tell::kSoon);
  receipts.Came(Receipts::kManyBytes);
  EXPECT_EQ(receipts.Next(), Tell::kNow);
}

// ----- blocks of memory that are kept for reuse

TEST(IdleBlocks, OneOfTheSameSizeIsUsedAgain) {
  IdleBlocks<int*> idle(100);
  int one = 0, other = 0;
  int* block = nullptr;
  EXPECT_FALSE(idle.Take(10, &block));
  EXPECT_TRUE(idle.Keep(10, &one));
  EXPECT_TRUE(idle.Keep(20, &other));
  EXPECT_FALSE(idle.Take(30, &block));
  ASSERT_TRUE(idle.Take(10, &block));
  EXPECT_EQ(block, &one);
  EXPECT_FALSE(idle.Take(10, &block)) << "once";
  EXPECT_EQ(idle.TakeAll(), std::vector<int*>({&other}));
}

TEST(IdleBlocks, NoMoreIsKeptThanTheLimit) {
  IdleBlocks<int*> idle(100);
  int any = 0;
  EXPECT_TRUE(idle.Keep(60, &any));
  EXPECT_FALSE(idle.Keep(41, &any));
  EXPECT_TRUE(idle.Keep(40, &any));
  int* block = nullptr;
  EXPECT_TRUE(idle.Take(60, &block));
  EXPECT_TRUE(idle.Keep(41, &any)) << "there is room again";
}

}  // namespace
}  // namespace ps
