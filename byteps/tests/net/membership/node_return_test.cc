// Tests of a node whose scheduler returns.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <thread>

#include "tests/net/membership/node_test.h"

namespace ps {
namespace {

using membership::Account;

class NodeReturnTest : public NodeMembershipTest {
 protected:
  void JoinAs(Node::Role role, double return_s = 600) {
    settings_.scheduler_return_s = return_s;
    NodeMembershipTest::JoinAs(role);
    answers_.erase(Control::ADD_NODE);  // the next scheduler answers when the test says so
  }
  // Ends the scheduler. Returns this node's account from its next registration.
  Account LoseScheduler(size_t attempts = 2) {
    membership_->OnDisconnect(kScheduler);
    const auto said = links_->Await(kScheduler, Control::ADD_NODE, attempts);
    return membership::ParseRegistration(said.back().meta.body).account;
  }
};

TEST_F(NodeReturnTest, AServerTellsWhatItKnows) {
  JoinAs(Node::SERVER);
  Say(Control::NODE_LEFT, "", {OtherWorker()});
  Say(Control::MEMBERS, Word(ReplicaView{4, 5, "10", "00", {0, 0}, {-1, -1}, ""}));
  const Account account = LoseScheduler();
  EXPECT_EQ(account.job, links_->job());
  EXPECT_EQ(account.scheduler_number, 1);
  EXPECT_EQ(account.left, std::set<int>{1});
  EXPECT_EQ(account.replicas.epoch, 5);
}

TEST_F(NodeReturnTest, WhatWasAskedIsAskedAgain) {
  JoinAs(Node::WORKER);
  Say(Control::MEMBERS, Word(ReplicaView{2, 5, "10", "01", {0, 5}, {-1, -1}, ""}));
  membership_->SayOfReplica(membership::Admit{1, 5});
  LoseScheduler();
  const int before = links_->CountTo(kScheduler, Control::MEMBERS);
  membership_->SayOfReplica(membership::Admit{1, 5});  // nobody is there to hear it
  EXPECT_EQ(links_->CountTo(kScheduler, Control::MEMBERS), before);
  Welcome(1, 2);
  EXPECT_EQ(links_->CountTo(kScheduler, Control::MEMBERS), before + 1);
  Say(Control::MEMBERS, Word(ReplicaView{2, 7, "11", "00", {0, 5}, {-1, -1}, ""}));
  LoseScheduler(3);
  Welcome(1, 3);  // the request was answered
  EXPECT_EQ(links_->CountTo(kScheduler, Control::MEMBERS), before + 1);
}

TEST_F(NodeReturnTest, AFarewellIsSaidAgain) {
  for (const char* failure : {"", "exit status 3"}) {
    JoinAs(Node::WORKER);
    std::thread leaver([&] { membership_->Leave({false, failure, ""}); });
    links_->Await(kScheduler, Control::LEAVE, 1);
    LoseScheduler();
    Welcome(1, 2);
    const auto said = links_->Await(kScheduler, Control::LEAVE, 2);
    EXPECT_EQ(said[1].meta.body, said[0].meta.body);
    Say(Control::NODE_LEFT, "", {links_->self()});
    leaver.join();
  }
}

TEST_F(NodeReturnTest, OneThatDoesNotReturnInTimeFailsTheJob) {
  JoinAs(Node::WORKER, 0.05);
  membership_->OnDisconnect(kScheduler);
  EXPECT_EQ(Await(MembershipEvent::kFailed).reason,
            "scheduler (10.0.0.1:9000) was lost: its connection closed; it did not return within "
            "0.1 s (BYTEPS_SCHEDULER_RETURN_S=0.05)");
}

TEST_F(NodeReturnTest, AnEarlierSchedulerIsNotHeard) {
  JoinAs(Node::WORKER);
  LoseScheduler();
  Welcome(1, 4);
  LoseScheduler(3);
  Welcome(1, 3);
  EXPECT_EQ(Await(MembershipEvent::kFailed).reason,
            "an earlier scheduler answers at scheduler (10.0.0.1:9000) than the one that this node "
            "has heard");
}

TEST_F(NodeReturnTest, ARefusalIsAnEnd) {
  JoinAs(Node::WORKER);
  LoseScheduler();
  Say(Control::REFUSED, "worker 0 was refused by the scheduler: it is in another job");
  EXPECT_EQ(Await(MembershipEvent::kFailed).reason,
            "worker 0 was refused by the scheduler: it is in another job");
}

}  // namespace
}  // namespace ps
