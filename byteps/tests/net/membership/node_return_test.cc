// What nodes tell a scheduler that returns, and nodes whose scheduler has died.
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "byteps/net/membership/account.h"
#include "byteps/net/membership/node_membership.h"
#include "ps/internal/postoffice.h"
#include "tests/net/membership/recorded_links.h"

namespace ps {
namespace {

using membership::Account;
using membership::MemberWord;

// ------------------------------------------------------------------ accounts

TEST(Account, SaysWhatItWasTold) {
  Account account;
  account.job = 0xffff'ffff'ffff'0001;
  account.life = 3;
  account.is_late = true;
  account.left = {0, 12};
  account.turns = {{0, 2}, {3, 1}};
  account.replicas = {4, 7, "10", "01", {0, 5}, ""};
  Account read;
  ASSERT_TRUE(ParseAccount("protocol=12" + PackAccount(account), &read));
  EXPECT_EQ(read.job, account.job);
  EXPECT_EQ(read.life, 3);
  EXPECT_TRUE(read.is_late);
  EXPECT_EQ(read.left, account.left);
  EXPECT_EQ(read.turns, account.turns);
  EXPECT_EQ(read.replicas.present, "10");
  EXPECT_TRUE(ParseAccount("protocol=12", &read));
  EXPECT_EQ(read.life, 0);
  for (const char* const bad :
       {"\n", "\njob=1 life=0 late=0 turns= left=\n", "\njob=0 life=1 late=0 turns= left=\n",
        "\njob=1 life=1 late=0 turns= left=x,\n", "\njob=1 life=1 late=0 left=\n",
        "\njob=1 life=1 late=0 turns=0 left=\n",
        "\njob=1 life=1 late=0 turns= left=", "\njob=1 life=1 late=0 turns= left=\nepoch=1"}) {
    EXPECT_FALSE(ParseAccount(bad, &read)) << bad;
  }
}

// ------------------------------------------------------------------ nodes

class NodeReturnTest : public testing::Test {
 protected:
  void JoinAs(Node::Role role, double return_s = 600) {
    role_ = role;
    links_ = std::make_unique<RecordedLinks>(role);
    links_->on_send = [this](const Message& message) {
      if (message.meta.control.cmd != Control::ADD_NODE || joined_) return;
      joined_ = true;
      Welcome(1);
      Say(Control::ADD_NODE, "link=25000 late=0 turns=");
    };
    MembershipSettings settings;
    settings.workers = settings.servers = 1;
    settings.rank = 0;
    settings.peer_timeout_s = 600;
    settings.scheduler_return_s = return_s;
    membership_ = std::make_unique<NodeMembership>(links_.get(), settings,
                                                   [this](const MembershipEvent& event) {
                                                     MutexLock lock(&mu_);
                                                     if (event.kind == MembershipEvent::kFailed) {
                                                       failure_ = event.reason;
                                                       cond_.NotifyAll();
                                                     }
                                                   });
    membership_->Join();
  }
  void Say(Control::Command command, const std::string& body, const std::vector<Node>& nodes = {}) {
    Message message;
    message.meta.sender = kScheduler;
    message.meta.control.cmd = command;
    message.meta.control.node = nodes;
    message.meta.body = body;
    membership_->Handle(message);
  }
  void Welcome(int life) {
    Node self = links_->self();
    self.id = role_ == Node::WORKER ? Postoffice::WorkerRankToID(0) : Postoffice::ServerRankToID(0);
    if (role_ == Node::WORKER) self.aux_id = 0;
    Say(Control::WELCOME, membership::PackWelcome(1, life), {self});
  }
  // The scheduler dies, and this node says that it returns.
  Account LoseScheduler(size_t attempts = 2) {
    membership_->OnDisconnect(kScheduler);
    const auto said = links_->Await(kScheduler, Control::ADD_NODE, attempts);
    Account account;
    EXPECT_TRUE(ParseAccount(said.back().meta.body, &account));
    return account;
  }
  std::string AwaitFailure() {
    MutexLock lock(&mu_);
    cond_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return !failure_.empty(); });
    return failure_;
  }

  Node::Role role_ = Node::WORKER;
  bool joined_ = false;
  std::unique_ptr<RecordedLinks> links_;
  std::unique_ptr<NodeMembership> membership_;
  Mutex mu_;
  CondVar cond_;
  std::string failure_ PS_GUARDED_BY(mu_);
};

TEST_F(NodeReturnTest, AServerTellsWhatItKnows) {
  JoinAs(Node::SERVER);
  Node worker;
  worker.role = Node::WORKER;
  worker.id = Postoffice::WorkerRankToID(3);
  worker.aux_id = 3;
  worker.port = 0;
  Say(Control::NODE_LEFT, "", {worker});
  Say(Control::MEMBERS, "workers=4 epoch=5 present=10 waiting=00 lives=0,0 ");
  const Account account = LoseScheduler();
  EXPECT_EQ(account.job, links_->job());
  EXPECT_EQ(account.life, 1);
  EXPECT_EQ(account.left, std::set<int>{3});
  EXPECT_EQ(account.replicas.epoch, 5);
}

TEST_F(NodeReturnTest, WhatWasAskedIsAskedAgain) {
  JoinAs(Node::WORKER);
  Say(Control::MEMBERS, "workers=2 epoch=5 present=10 waiting=01 lives=0,5 ");
  membership_->SayOfReplica({MemberWord::kAdmit, 1, 5});
  LoseScheduler();
  const int before = links_->CountTo(kScheduler, Control::MEMBERS);
  membership_->SayOfReplica({MemberWord::kAdmit, 1, 5});  // to nobody
  EXPECT_EQ(links_->CountTo(kScheduler, Control::MEMBERS), before);
  Welcome(2);
  EXPECT_EQ(links_->CountTo(kScheduler, Control::MEMBERS), before + 1);
  Say(Control::MEMBERS, "workers=2 epoch=7 present=11 waiting=00 lives=0,5 ");
  LoseScheduler(3);
  Welcome(3);  // it has been answered
  EXPECT_EQ(links_->CountTo(kScheduler, Control::MEMBERS), before + 1);
}

TEST_F(NodeReturnTest, OneThatDoesNotReturnInTimeFailsTheJob) {
  JoinAs(Node::WORKER, 0.05);
  membership_->OnDisconnect(kScheduler);
  EXPECT_EQ(AwaitFailure(),
            "scheduler (10.0.0.1:9000) was lost: its connection closed; it did not return within "
            "0.1 s (BYTEPS_SCHEDULER_RETURN_S=0.05)");
}

TEST_F(NodeReturnTest, AnEarlierSchedulerIsNotHeard) {
  JoinAs(Node::WORKER);
  LoseScheduler();
  Welcome(4);
  LoseScheduler(3);
  Welcome(3);
  EXPECT_EQ(AwaitFailure(),
            "an earlier scheduler answers at scheduler (10.0.0.1:9000) than the one that this node "
            "has heard");
}

TEST_F(NodeReturnTest, ARefusalIsAnEnd) {
  JoinAs(Node::WORKER);
  LoseScheduler();
  Say(Control::REFUSED, "worker 0 was refused by the scheduler: it is in another job");
  EXPECT_EQ(AwaitFailure(), "worker 0 was refused by the scheduler: it is in another job");
}

}  // namespace
}  // namespace ps
