// A scheduler that replaces servers which are lost while the job goes on.
#include <gtest/gtest.h>

#include <string>

#include "tests/net/membership/membership_test.h"

namespace ps {
namespace {

TEST_F(SchedulerMembershipTest, AnotherServerTakesThePlaceOfALostOne) {
  GatherReplacing();
  Register(Node::SERVER, -1, -1, 1);
  EXPECT_EQ(links_.LastRefusal().find(membership::kAgain), 0u) << "it may wait for a place";
  membership_->OnDisconnect(server_);
  EXPECT_EQ(failure(), "");
  for (const int id : {worker_, other_}) {
    const MemberWord word = LastWord(id);
    EXPECT_EQ(word.kind, MemberWord::kServerLost);
    EXPECT_EQ(word.number, 0);
    EXPECT_EQ(word.text, "server 0 (10.0.0.2:9001) was lost: its connection closed");
  }
  EXPECT_EQ(links_.CountTo(server_, Control::JOB_FAILED), 1) << "should it be there after all";
  Register(Node::SERVER, -1, -1, 1);
  EXPECT_EQ(links_.CountTo(server_, Control::ADD_NODE), 2) << "it joins at once";
  for (const int id : {worker_, other_}) {
    EXPECT_EQ(LastWord(id).kind, MemberWord::kServerReplaced);
    EXPECT_EQ(links_.SentTo(id, Control::MEMBERS).back().meta.control.node.at(0).port, 9001);
  }
  EXPECT_EQ(membership_->View().phase, JobView::kRunning);
  EXPECT_EQ(failure(), "");
}

TEST_F(SchedulerMembershipTest, WithoutTheSettingItsLossEndsTheJob) {
  Gather();
  membership_->OnDisconnect(server_);
  EXPECT_NE(failure().find("server 0 (10.0.0.2:9001) was lost"), std::string::npos) << failure();
}

TEST_F(SchedulerMembershipTest, WhoHasLeftStaysForOthersWhileAServerMayBeLost) {
  GatherReplacing();
  Say(worker_, Control::LEAVE, "finish");
  EXPECT_EQ(links_.CountTo(worker_, Control::NODE_LEFT), 0) << "its sums may be wanted";
  membership_->OnDisconnect(server_);
  EXPECT_EQ(LastWord(worker_).kind, MemberWord::kServerLost);
  Register(Node::SERVER, -1, -1, 1);
  EXPECT_EQ(LastWord(worker_).kind, MemberWord::kServerReplaced);
  EXPECT_EQ(links_.CountTo(server_, Control::NODE_LEFT), 0) << "it may give what others lack";
  Say(other_, Control::LEAVE, "finish");
  EXPECT_EQ(links_.CountTo(worker_, Control::NODE_LEFT), 1);
  EXPECT_EQ(links_.CountTo(other_, Control::NODE_LEFT), 1);
  EXPECT_TRUE(ended());
}

TEST_F(SchedulerMembershipTest, AServerIsReplacedWhoseLinkWithAWorkerBroke) {
  GatherReplacing();
  // Of one that has lost its place it is no news.
  membership_->OnDisconnect(server_);
  Register(Node::SERVER, -1, -1, 1);
  Accuse(worker_, 9002);
  EXPECT_EQ(LastWord(worker_).kind, MemberWord::kServerReplaced);
  Accuse(worker_, 9001);
  EXPECT_EQ(failure(), "") << "without the worker there is no job";
  EXPECT_EQ(LastWord(other_).kind, MemberWord::kServerLost);
}

TEST_F(SchedulerMembershipTest, AServerThatIsHeardIsNotTheOneThatIsGone) {
  GatherReplacingReplicas();
  Accuse(worker_, 9001);
  EXPECT_EQ(links_.CountTo(other_, Control::MEMBERS), 0) << "nobody is lost yet";
  Say(server_, Control::HEARTBEAT, "");
  EXPECT_EQ(LastTold(server_).present, "01");
  EXPECT_EQ(failure(), "");
}

TEST_F(SchedulerMembershipTest, AServerThatIsNotHeardIs) {
  GatherReplacingReplicas();
  Accuse(worker_, 9001);
  const auto words = links_.Await(other_, Control::MEMBERS, 1);  // for some seconds
  MemberWord word;
  ASSERT_TRUE(membership::ParseWord(words[0].meta.body, &word));
  EXPECT_EQ(word.kind, MemberWord::kServerLost);
  EXPECT_EQ(membership_->View().replicas.present, "11");
}

TEST_F(SchedulerMembershipTest, AServerIsGoneThatMostReplicasHaveLost) {
  GatherReplacingReplicas();
  Accuse(worker_, 9001);
  Accuse(other_, 9001);
  EXPECT_EQ(LastWord(worker_).kind, MemberWord::kServerLost);
  EXPECT_EQ(LastWord(other_).kind, MemberWord::kServerLost);
  Register(Node::SERVER, -1, -1, 1);
  Say(server_, Control::HEARTBEAT, "");
  EXPECT_EQ(membership_->View().replicas.present, "11") << "nobody is to blame any more";
  EXPECT_EQ(failure(), "");
}

TEST_F(SchedulerMembershipTest, AServerThatHasLostTheLastReplicaIsGone) {
  GatherReplacingReplicas();
  AccuseWorker(worker_);
  EXPECT_EQ(LastTold(server_).present, "01");
  AccuseWorker(other_);
  EXPECT_EQ(failure(), "") << "without the last replica there is no job";
  EXPECT_EQ(LastWord(other_).kind, MemberWord::kServerLost);
}

TEST_F(SchedulerMembershipTest, WhatALostServerHasSaidCountsNoMore) {
  GatherReplacingReplicas();
  Say(worker_, Control::LEAVE, "failed: exit status 3");
  Accuse(other_, 9001);
  AccuseWorker(other_);
  EXPECT_EQ(failure(), "");
  EXPECT_EQ(LastWord(other_).kind, MemberWord::kServerLost);
}

TEST_F(SchedulerMembershipTest, ANewServerTakesThePlaceThatIsVacantForLongest) {
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
    EXPECT_EQ(LastWord(worker_).kind, MemberWord::kServerReplaced);
    EXPECT_EQ(LastWord(worker_).number, rank);
  }
}

}  // namespace
}  // namespace ps
