// ServerPlaces: lost servers are replaced while the job goes on.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/recovery/scheduler/recovery_test.h"

namespace ps {
namespace {

using ServerPlacesTest = RecoveryTest;
using Ranks = std::vector<int>;

TEST_F(ServerPlacesTest, AnotherServerTakesThePlaceOfALostOne) {
  GatherReplacing();
  Register(Node::SERVER, -1, -1, 1);
  EXPECT_EQ(links_.LastRefusal().find(membership::kAgain), 0u) << "it may wait for a place";
  membership_->OnDisconnect(server_);
  EXPECT_EQ(failure(), "");
  for (const int id : {worker_, other_}) {
    const auto word = LastWord<membership::ServerLost>(id);
    EXPECT_EQ(word.rank, 0);
    EXPECT_EQ(word.reason, "server 0 (10.0.0.2:9001) was lost: its connection closed");
  }
  EXPECT_EQ(links_.CountTo(server_, Control::JOB_FAILED), 1) << "should it be there after all";
  Register(Node::SERVER, -1, -1, 1);
  EXPECT_EQ(links_.CountTo(server_, Control::ADD_NODE), 2) << "it joins at once";
  for (const int id : {worker_, other_}) {
    LastWord<membership::ServerReplaced>(id);
    EXPECT_EQ(links_.SentTo(id, Control::MEMBERS).back().meta.control.node.at(0).port, 9001);
  }
  EXPECT_EQ(membership_->View().phase, JobView::kRunning);
  EXPECT_EQ(failure(), "");
}

TEST_F(ServerPlacesTest, WithoutTheSettingItsLossEndsTheJob) {
  Gather();
  membership_->OnDisconnect(server_);
  EXPECT_NE(failure().find("server 0 (10.0.0.2:9001) was lost"), std::string::npos) << failure();
}

TEST_F(ServerPlacesTest, WhoHasLeftStaysForOthersWhileAServerMayBeLost) {
  GatherReplacing();
  Say(worker_, Control::LEAVE, Finish());
  EXPECT_EQ(links_.CountTo(worker_, Control::NODE_LEFT), 0) << "its sums may be wanted";
  membership_->OnDisconnect(server_);
  LastWord<membership::ServerLost>(worker_);
  Register(Node::SERVER, -1, -1, 1);
  LastWord<membership::ServerReplaced>(worker_);
  EXPECT_EQ(links_.CountTo(server_, Control::NODE_LEFT), 0) << "it may give what others lack";
  Say(other_, Control::LEAVE, Finish());
  EXPECT_EQ(links_.CountTo(worker_, Control::NODE_LEFT), 1);
  EXPECT_EQ(links_.CountTo(other_, Control::NODE_LEFT), 1);
  EXPECT_TRUE(ended());
}

TEST_F(ServerPlacesTest, ANewServerTakesThePlaceThatIsVacantForLongest) {
  MembershipSettings settings;
  settings.workers = 1;
  settings.servers = 2;
  settings.replace_servers_s = 600;
  Start(settings);
  for (int i = 0; i < 2; ++i) Register(Node::SERVER, -1, -1, 2);
  Register(Node::WORKER, 0, 1, 2);
  ASSERT_EQ(membership_->View().phase, JobView::kRunning);
  for (const int rank : {1, 0}) membership_->OnDisconnect(Postoffice::ServerRankToID(rank));
  for (const int rank : {1, 0}) {
    Register(Node::SERVER, -1, -1, 2);
    EXPECT_EQ(LastWord<membership::ServerReplaced>(worker_).rank, rank);
  }
}

TEST_F(LostNeighborTest, TheOthersHearThatAServerIsLostAndReplaced) {
  GatherServers(4);
  membership_->OnDisconnect(Id(1));
  for (const int rank : {0, 2, 3}) ExpectWord<membership::ServerLost>(rank, 1);
  EXPECT_EQ(CountWords(1), 0);
  Come();
  EXPECT_EQ(Told(1), (Ranks{0, 2}));
  EXPECT_EQ(CountWords(1), 0) << "of itself there is no news";
  for (const int rank : {0, 2, 3}) {
    ExpectWord<membership::ServerReplaced>(rank, 1);
    EXPECT_EQ(LastWord<membership::ServerReplaced>(Id(rank)).servers, 4)
        << "so it knows its neighbors";
    const auto told = links_.SentTo(Id(rank), Control::MEMBERS);
    EXPECT_EQ(told.back().meta.control.node.at(0).id, Id(1));
  }
  EXPECT_EQ(failure(), "");
}

TEST_F(LostNeighborTest, AServerThatComesHearsWhoIsLost) {
  GatherServers(3);
  membership_->OnDisconnect(Id(1));
  membership_->OnDisconnect(Id(2));
  Come();
  EXPECT_EQ(Told(1), Ranks{0});
  ExpectWord<membership::ServerLost>(1, 2);
  Come();
  EXPECT_EQ(Told(2), (Ranks{0, 1}));
  ExpectWord<membership::ServerReplaced>(1, 2);
  ExpectWord<membership::ServerReplaced>(0, 2);
}

TEST_F(LostNeighborTest, WithoutCopiesServersMeetNobody) {
  GatherServers(2, false);
  EXPECT_EQ(Told(0), Ranks());
  membership_->OnDisconnect(Id(1));
  Come();
  EXPECT_EQ(Told(1), Ranks());
  ExpectWord<membership::ServerReplaced>(0,
                                         1);  // workers receive it too, so that none counts as late
  LastWord<membership::ServerReplaced>(worker_);
}

}  // namespace
}  // namespace ps
