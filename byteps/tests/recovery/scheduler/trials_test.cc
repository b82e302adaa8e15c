// Trials: decides which of two nodes is lost if their link breaks.
#include <gtest/gtest.h>

#include "tests/recovery/scheduler/recovery_test.h"

namespace ps {
namespace {

using TrialsTest = RecoveryTest;

TEST_F(TrialsTest, AServerIsReplacedWhoseLinkWithAWorkerBroke) {
  GatherReplacing();
  // A report about a server that was replaced already has no effect.
  membership_->OnDisconnect(server_);
  Register(Node::SERVER, -1, -1, 1);
  Accuse(worker_, 9002);
  LastWord<membership::ServerReplaced>(worker_);
  Accuse(worker_, 9001);
  EXPECT_EQ(failure(), "") << "without the worker there is no job";
  LastWord<membership::ServerLost>(other_);
}

TEST_F(TrialsTest, AServerThatIsHeardIsNotTheOneThatIsGone) {
  GatherReplacingReplicas();
  Accuse(worker_, 9001);
  EXPECT_EQ(links_.CountTo(other_, Control::MEMBERS), 0) << "nobody is lost yet";
  Say(server_, Control::HEARTBEAT, "");
  EXPECT_EQ(LastTold(server_).present, "01");
  EXPECT_EQ(failure(), "");
}

TEST_F(TrialsTest, AServerThatIsNotHeardIs) {
  GatherReplacingReplicas();
  Accuse(worker_, 9001);
  const auto words = links_.Await(other_, Control::MEMBERS, 1);  // takes some seconds
  WordIn<membership::ServerLost>(words[0]);
  EXPECT_EQ(membership_->View().replicas.present, "11");
}

TEST_F(TrialsTest, AServerIsGoneThatMostReplicasHaveLost) {
  GatherReplacingReplicas();
  Accuse(worker_, 9001);
  Accuse(other_, 9001);
  LastWord<membership::ServerLost>(worker_);
  LastWord<membership::ServerLost>(other_);
  Register(Node::SERVER, -1, -1, 1);
  Say(server_, Control::HEARTBEAT, "");
  EXPECT_EQ(membership_->View().replicas.present, "11") << "nobody is to blame any more";
  EXPECT_EQ(failure(), "");
}

TEST_F(TrialsTest, AServerThatHasLostTheLastReplicaIsGone) {
  GatherReplacingReplicas();
  AccuseWorker(worker_);
  EXPECT_EQ(LastTold(server_).present, "01");
  AccuseWorker(other_);
  EXPECT_EQ(failure(), "") << "without the last replica there is no job";
  LastWord<membership::ServerLost>(other_);
}

TEST_F(TrialsTest, WhatALostServerHasSaidCountsNoMore) {
  GatherReplacingReplicas();
  Say(worker_, Control::LEAVE, Failed("exit status 3"));
  Accuse(other_, 9001);
  AccuseWorker(other_);
  EXPECT_EQ(failure(), "");
  LastWord<membership::ServerLost>(other_);
}

TEST_F(LostNeighborTest, WhoAccusesAServerThatIsHeardIsLost) {
  GatherServers(2);
  Accuse(Id(0), Id(1), 9001, "server 1 was lost to server 0");
  EXPECT_EQ(CountWords(1), 0) << "nobody is lost yet";
  Say(Id(1), Control::HEARTBEAT, "");
  ExpectWord<membership::ServerLost>(1, 0);
  EXPECT_EQ(LastWord<membership::ServerLost>(Id(1)).reason,
            "server 0 (10.0.0.2:9001) cannot go on: server 1 was lost to server 0");
  EXPECT_EQ(LastWord<membership::ServerLost>(worker_).rank, 0);
  EXPECT_EQ(failure(), "");
}

TEST_F(LostNeighborTest, AServerThatIsAccusedAndNotHeardIsLost) {
  GatherServers(2);
  Accuse(Id(0), Id(1), 9001, "server 1 was lost to server 0");
  links_.Await(Id(0), Control::MEMBERS, 1);  // takes some seconds
  ExpectWord<membership::ServerLost>(0, 1);
  EXPECT_EQ(failure(), "");
}

TEST_F(LostNeighborTest, OfTwoThatAccuseEachOtherOneIsLost) {
  GatherServers(2);
  Accuse(Id(0), Id(1), 9001, "server 1 was lost to server 0");
  Accuse(Id(1), Id(0), 9001, "server 0 was lost to server 1");
  ExpectWord<membership::ServerLost>(1, 0);
  Come();
  ExpectWord<membership::ServerReplaced>(1, 0);
  Say(Id(1), Control::HEARTBEAT, "");
  Say(Id(0), Control::HEARTBEAT, "");
  EXPECT_EQ(CountWords(0), 0) << "its place is another's by now";
  EXPECT_EQ(failure(), "");
}

TEST_F(LostNeighborTest, WhoIsLostAccusesNobodyAnyMore) {
  GatherServers(3);
  Accuse(Id(0), Id(1), 9001, "server 1 was lost to server 0");
  membership_->OnDisconnect(Id(0));
  Come();
  Say(Id(1), Control::HEARTBEAT, "");
  ExpectWord<membership::ServerReplaced>(1, 0);
  EXPECT_EQ(links_.CountTo(worker_, Control::MEMBERS), 2) << "one was lost, and one has its place";
}

TEST_F(LostNeighborTest, AReportOfALinkWithAnEarlierServerIsNoNews) {
  GatherServers(2);
  membership_->OnDisconnect(Id(1));
  Accuse(Id(0), Id(1), 9001, "server 1 was lost to server 0");
  Come();
  Accuse(Id(0), Id(1), 9002, "server 1 was lost to server 0");
  Say(Id(1), Control::HEARTBEAT, "");
  ExpectWord<membership::ServerReplaced>(0, 1);
  EXPECT_EQ(CountWords(1), 0);
  EXPECT_EQ(failure(), "");
}

}  // namespace
}  // namespace ps
