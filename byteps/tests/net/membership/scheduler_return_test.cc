// A scheduler to which the nodes of another one come, and nodes whose scheduler has died.
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "byteps/net/link/node_token.h"
#include "byteps/net/membership/account.h"
#include "byteps/net/membership/node_membership.h"
#include "tests/net/membership/scheduler_test.h"

namespace ps {
namespace {

using membership::Account;
using membership::Accounts;
using membership::PackWord;

constexpr uint64_t kJob = 77 << 16 | 1;

class SchedulerReturnTest : public SchedulerMembershipTest {
 protected:
  void StartAgain(int workers, double return_s = 600) {
    MembershipSettings settings;
    settings.workers = workers;
    settings.servers = 1;
    settings.scheduler_return_s = return_s;
    Start(settings);
  }

  struct Comes {
    uint64_t job = kJob;
    int life = 1;
    uint64_t token = 0;
    int workers = -1;
    bool is_late = false;
    std::set<int> left;
    std::string view;  // "epoch=5 present=10 waiting=00 lives=0,0"
  };
  void Return(int id, const Comes& comes) {
    Account account;
    account.job = comes.job;
    account.life = comes.life;
    account.is_late = comes.is_late;
    account.left = comes.left;
    if (!comes.view.empty()) {
      EXPECT_TRUE(membership::ParseReplicas("workers=4 " + comes.view + " ", &account.replicas));
    }
    const bool worker = id % 2 != 0;
    membership::Claim claim;
    claim.protocol = membership::kProtocol;
    claim.workers = comes.workers;
    claim.replicas = worker ? replicas_ : 0;
    Message message;
    message.meta.control.cmd = Control::ADD_NODE;
    message.meta.body = PackClaim(claim) + PackAccount(account);
    Node node;
    node.role = worker ? Node::WORKER : Node::SERVER;
    node.id = id;
    node.aux_id = worker ? Postoffice::IDtoRank(id) : -1;
    node.hostname = "10.0.0.2";
    node.port = worker ? 0 : 9001;
    SetToken(comes.token != 0 ? comes.token : id, &node);
    message.meta.control.node.push_back(node);
    membership_->Handle(message);
  }
  void Return(int id) { Return(id, Comes()); }
  int Id(int rank) { return Postoffice::WorkerRankToID(rank); }
  void SayLeft(int rank) {
    Say(server_, Control::MEMBERS, PackWord({MemberWord::kLeftKnown, rank}));
  }
};

TEST_F(SchedulerReturnTest, TheJobGoesOnWhenAllHaveComeBack) {
  StartAgain(2);
  Return(server_);
  Return(worker_);
  EXPECT_EQ(links_.job(), kJob);
  EXPECT_EQ(links_.SentTo(worker_, Control::WELCOME)[0].meta.body, "1 life=2");
  Say(worker_, Control::LEAVE, "finish");  // waits for the others
  EXPECT_EQ(links_.CountTo(server_, Control::NODE_LEFT), 0);
  Return(other_);
  EXPECT_EQ(membership_->View().phase, JobView::kRunning);
  Say(other_, Control::LEAVE, "finish");
  EXPECT_EQ(links_.CountTo(worker_, Control::NODE_LEFT), 0);  // the server does not know yet
  SayLeft(0);
  EXPECT_EQ(links_.CountTo(worker_, Control::NODE_LEFT), 1);
  EXPECT_FALSE(ended());
  SayLeft(1);
  EXPECT_TRUE(ended());
  EXPECT_EQ(links_.CountTo(server_, Control::JOB_END), 1);
  EXPECT_EQ(failure(), "");
}

TEST_F(SchedulerReturnTest, ALossFailsTheJobAsBefore) {
  StartAgain(2);
  for (const int id : {server_, worker_, other_}) Return(id);
  membership_->OnDisconnect(worker_);
  EXPECT_EQ(failure(), "worker 0 (10.0.0.2) was lost: its connection closed");
  EXPECT_EQ(links_.CountTo(other_, Control::JOB_FAILED), 1);
}

TEST_F(SchedulerReturnTest, WhoIsLostBeforeAllHaveComeMayComeAgain) {
  StartAgain(2);
  Return(server_);
  Return(worker_);
  membership_->OnDisconnect(worker_);
  Return(other_);
  EXPECT_EQ(membership_->View().phase, JobView::kGathering);
  Return(worker_, {.life = 2});
  EXPECT_EQ(membership_->View().phase, JobView::kRunning);
  EXPECT_EQ(links_.SentTo(worker_, Control::WELCOME).back().meta.body, "1 life=3");
  EXPECT_EQ(failure(), "");
}

TEST_F(SchedulerReturnTest, OfThoseThatLeftServersTell) {
  StartAgain(2);
  Return(server_, {.left = {0}});
  EXPECT_EQ(membership_->View().phase, JobView::kGathering);
  Return(other_);
  EXPECT_EQ(membership_->View().phase, JobView::kRunning);
  Say(other_, Control::LEAVE, "finish");
  SayLeft(1);
  EXPECT_TRUE(ended());
}

TEST_F(SchedulerReturnTest, AJobThatIsOverEnds) {
  StartAgain(2);
  Return(server_, {.left = {0, 1}});
  EXPECT_TRUE(ended());
  EXPECT_EQ(links_.CountTo(server_, Control::JOB_END), 1);
}

TEST_F(SchedulerReturnTest, NewcomersGiveWay) {
  StartAgain(2);
  Register(Node::SERVER, -1, -1, 1);
  Return(worker_);
  EXPECT_EQ(links_.LastRefusal().rfind("again: ", 0), 0u) << links_.LastRefusal();
  Register(Node::WORKER, 1, 2, 1);
  EXPECT_EQ(links_.LastRefusal().rfind("again: ", 0), 0u) << links_.LastRefusal();
  Return(server_);
  Return(other_);
  EXPECT_EQ(membership_->View().phase, JobView::kRunning);
}

TEST_F(SchedulerReturnTest, OthersAreRefusedAndToldWhy) {
  StartAgain(2);
  Return(server_);
  Return(worker_, {.job = 5 << 16});
  EXPECT_NE(links_.LastRefusal().find("it is in another job than the one that this scheduler"),
            std::string::npos);
  Return(worker_, {.workers = 3});
  EXPECT_NE(links_.LastRefusal().find("it is in a job of 3 workers"), std::string::npos);
  Return(Id(2));  // the job has no such rank
  EXPECT_NE(links_.LastRefusal().find("does not make sense"), std::string::npos);
  Return(worker_);
  Return(other_);
  Return(worker_, {.life = 9});  // this one was cut off, and another has the job
  EXPECT_NE(links_.LastRefusal().find("another scheduler, which began later"), std::string::npos);
  Return(worker_, {.life = 2, .token = 99});
  EXPECT_NE(links_.LastRefusal().find("another process has its place"), std::string::npos);
  EXPECT_EQ(failure(), "");
}

TEST_F(SchedulerReturnTest, ARunningJobTakesNoOther) {
  StartAgain(2);
  GatherNodes();
  Return(worker_, {.job = 5 << 16});
  EXPECT_NE(links_.LastRefusal().find("it is in another job"), std::string::npos);
  EXPECT_EQ(membership_->View().phase, JobView::kRunning);
}

TEST_F(SchedulerReturnTest, WithoutTheSettingNobodyIsTaken) {
  StartAgain(2, 0);
  Return(worker_);
  EXPECT_NE(links_.LastRefusal().find("set BYTEPS_SCHEDULER_RETURN_S on all nodes"),
            std::string::npos);
}

// ------------------------------------------------------------------ replicas

TEST_F(SchedulerReturnTest, AChangeThatOnlySomeHeardIsToldToAll) {
  // Workers know that replica 1 was removed, the server does not.
  replicas_ = 2;
  StartAgain(4);
  Return(server_, {.view = "epoch=0 present=11 waiting=00 lives=0,0"});
  Return(Id(0), {.view = "epoch=1 present=10 waiting=00 lives=0,0"});
  Return(Id(1));
  EXPECT_EQ(LastTold(server_).epoch, 2);
  EXPECT_EQ(LastTold(server_).present, "10");
  EXPECT_EQ(links_.SentTo(server_, Control::MEMBERS).back().meta.control.node.size(), 2u);
  Register(Node::WORKER, 2, 4, 1);  // not before the server has dropped the last one
  EXPECT_EQ(links_.LastRefusal().rfind("again: ", 0), 0u);
  Acknowledge();
  Register(Node::WORKER, 2, 4, 1);
  Register(Node::WORKER, 3, 4, 1);
  Say(Id(2), Control::MEMBERS, PackWord({MemberWord::kReady}));
  Say(Id(3), Control::MEMBERS, PackWord({MemberWord::kReady}));
  const ReplicaView waits = LastTold(worker_);
  EXPECT_EQ(waits.waiting, "01");
  Say(worker_, Control::MEMBERS, PackWord({MemberWord::kAdmit, 1, waits.lives[1]}));
  Acknowledge();
  EXPECT_EQ(LastTold(worker_).present, "11");
}

TEST_F(SchedulerReturnTest, OneThatDoesNotKnowThatItWasRemovedIsTold) {
  replicas_ = 2;
  StartAgain(4);
  Return(Id(2));
  Return(server_, {.view = "epoch=3 present=10 waiting=00 lives=0,0"});
  for (const int rank : {0, 1}) Return(Id(rank));
  EXPECT_EQ(links_.CountTo(Id(2), Control::JOB_FAILED), 1);
  EXPECT_EQ(links_.CountTo(Id(0), Control::JOB_FAILED), 0);
  Return(Id(3));
  EXPECT_NE(links_.LastRefusal().find("its replica was removed"), std::string::npos);
}

TEST_F(SchedulerReturnTest, AnAdmissionInFlightIsCompleted) {
  // The server knows it, and workers see the replica wait.
  replicas_ = 2;
  StartAgain(4);
  const std::string waits = "epoch=5 present=10 waiting=01 lives=0,5";
  Return(server_, {.view = "epoch=6 present=11 waiting=00 lives=0,5"});
  for (const int rank : {0, 1}) Return(Id(rank), {.view = waits});
  for (const int rank : {2, 3}) Return(Id(rank), {.is_late = true, .view = waits});
  EXPECT_EQ(LastTold(server_).present, "11");
  EXPECT_EQ(LastTold(worker_).present, "10");
  Acknowledge();
  EXPECT_EQ(LastTold(worker_).present, "11");
  EXPECT_EQ(LastTold(worker_).lives[1], 5);
}

TEST_F(SchedulerReturnTest, OneThatGathersGoesOnGathering) {
  replicas_ = 2;
  StartAgain(4);
  const std::string removed = "epoch=4 present=10 waiting=00 lives=0,2";
  Return(server_, {.view = removed});
  Return(Id(2), {.is_late = true});  // has heard nothing yet
  for (const int rank : {0, 1}) Return(Id(rank), {.view = removed});
  Register(Node::WORKER, 3, 4, 1);
  Say(Id(2), Control::MEMBERS, PackWord({MemberWord::kReady}));
  Say(Id(3), Control::MEMBERS, PackWord({MemberWord::kReady}));
  EXPECT_EQ(LastTold(worker_).waiting, "01");
  // Its connections with servers are of this life.
  EXPECT_TRUE(links_.SentTo(server_, Control::MEMBERS)[0].meta.control.node.empty());
}

TEST_F(SchedulerReturnTest, ServersKnowFromTheBeginningThatThereAreReplicas) {
  replicas_ = 2;
  StartAgain(4);
  Register(Node::SERVER, -1, -1, 1);
  for (int rank = 0; rank < 4; ++rank) Register(Node::WORKER, rank, 4, 1);
  EXPECT_EQ(LastTold(server_).present, "11");
  EXPECT_EQ(links_.CountTo(worker_, Control::MEMBERS), 0);
}

TEST_F(SchedulerReturnTest, OneThatNeverComesBackIsRemovedThoughAllOthersHaveLeft) {
  // It has left while there was no scheduler, and nobody else has heard of that.
  MembershipSettings settings;
  settings.workers = 4;
  settings.servers = 1;
  settings.scheduler_return_s = 0.2;
  settings.peer_timeout_s = 6;
  settings.start_timeout_s = 600;
  membership_ = std::make_unique<SchedulerMembership>(
      &links_, settings, [this](const MembershipEvent& e) { OnEvent(e); });
  membership_->Join();
  Return(server_, {.left = {0, 1, 2}, .view = "epoch=0 present=11 waiting=00 lives=0,0"});
  EXPECT_FALSE(ended());
  while (!ended() && failure().empty()) usleep(10'000);
  EXPECT_EQ(failure(), "");
  EXPECT_TRUE(ended());
}

TEST_F(SchedulerReturnTest, WhatHasHeardThatTheJobIsOverNeedsNotComeBack) {
  MembershipSettings settings;
  settings.workers = 2;
  settings.servers = 2;
  settings.scheduler_return_s = 0.2;
  membership_ = std::make_unique<SchedulerMembership>(
      &links_, settings, [this](const MembershipEvent& e) { OnEvent(e); });
  membership_->Join();
  Return(server_, {.left = {0}});
  Return(other_);
  Say(other_, Control::LEAVE, "finish");
  while (!ended() && failure().empty()) usleep(10'000);
  EXPECT_EQ(failure(), "");
  EXPECT_EQ(links_.CountTo(other_, Control::NODE_LEFT), 1);
  EXPECT_EQ(links_.CountTo(other_, Control::JOB_FAILED), 0);
  EXPECT_EQ(links_.CountTo(server_, Control::JOB_END), 1);
}

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
        "\njob=1 life=1 late=0 turns=0 left=\n", "\njob=1 life=1 late=0 turns= left=",
        "\njob=1 life=1 late=0 turns= left=\nepoch=1"}) {
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
