// How many connections a link wants; and what becomes of one that broke: how long, and in which
// words.
#include <gtest/gtest.h>

#include <string>

#include "byteps/net/link/link_outage.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/link/node_text.h"
#include "byteps/net/rdma/wire.h"
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
  outage.listener_gone = true;  // the process has ended, and that is all
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
  outage.unacknowledged = 16;  // it says nothing of large ones
  EXPECT_EQ(outage.GivenUp(2, ""),
            "its connection timed out, and was made again, but of 16 bytes that were sent since "
            "none was acknowledged within 2.0 s (BYTEPS_RECONNECT_TIMEOUT_S=2)");
  // The last attempt failed otherwise.
  EXPECT_EQ(outage.GivenUp(2, "no answer"),
            "its connection timed out, and could not be made again within 2.0 s "
            "(BYTEPS_RECONNECT_TIMEOUT_S=2): no answer");
}

TEST(RdmaWire, ARefusalSaysWhetherItWillPass) {
  rdma::Refusal said, heard;
  said.again_soon = true;
  said.reason = std::string(500, 'x');
  const std::string bytes = said.Encode();
  ASSERT_EQ(bytes.size(), 148u);
  ASSERT_TRUE(heard.Decode(bytes.data(), bytes.size()));
  EXPECT_TRUE(heard.again_soon);
  EXPECT_EQ(heard.reason, std::string(122, 'x'));
  EXPECT_EQ(heard.Claims(), said.Claims());
  const std::string claims = said.Claims();
  said.again_soon = false;
  EXPECT_NE(said.Claims(), claims);
  said.proof = std::string(rdma::kAnswerProofBytes, 'p');
  ASSERT_TRUE(heard.Decode(said.Encode().data(), bytes.size()));
  EXPECT_FALSE(heard.again_soon);
  EXPECT_EQ(heard.proof, said.proof);
  EXPECT_EQ(heard.reason, std::string(122, 'x'));
}

TEST(RdmaWire, AProofIsOverAllThatAnAnswerSays) {
  rdma::ConnectReply reply;
  reply.slots = 8;
  const std::string claims = reply.Claims();
  reply.slots = 12;
  EXPECT_NE(reply.Claims(), claims);
  reply.proof = std::string(auth::kProofBytes, 'p');
  EXPECT_EQ(reply.Encode(), reply.Claims() + reply.proof);
  rdma::Challenge said, heard;
  said.sender = 5;
  said.nonce = std::string(auth::kNonceBytes, 'n');
  said.proof = std::string(rdma::kAnswerProofBytes, 'p');
  ASSERT_TRUE(heard.Decode(said.Encode().data(), said.Encode().size()));
  EXPECT_EQ(heard.Claims(), said.Claims());
  EXPECT_EQ(heard.proof, said.proof);
}

TEST(RdmaWire, ARequestThatResumesIsProvedAsOne) {
  rdma::ConnectRequest said, heard;
  said.sender = 7;
  said.slots = 8;
  const std::string first = said.Claims();
  said.resumes = true;
  EXPECT_NE(said.Claims(), first);
  const std::string bytes = said.Encode();
  ASSERT_TRUE(heard.Decode(bytes.data(), bytes.size()));
  EXPECT_TRUE(heard.resumes);
  EXPECT_FALSE(heard.is_data_plane);
}

}  // namespace
}  // namespace ps
