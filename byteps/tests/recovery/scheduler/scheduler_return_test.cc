// SchedulerReturn: nodes return to a restarted scheduler.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "byteps/net/link/admission.h"
#include "byteps/net/membership/words.h"
#include "tests/recovery/scheduler/recovery_test.h"

namespace ps {
namespace {

using membership::Account;

constexpr uint64_t kJob = 77 << 16 | 1;

class SchedulerReturnTest : public RecoveryTest {
 protected:
  void StartAgain(int workers, double return_s = 600, double replace_s = 0) {
    MembershipSettings settings;
    settings.replace_servers_s = replace_s;
    settings.workers = workers;
    settings.servers = 1;
    settings.scheduler_return_s = return_s;
    Start(settings);
  }

  struct Comes {
    uint64_t job = kJob;
    int scheduler_number = 1;
    uint64_t token = 0;
    int workers = -1;
    bool is_late = false;
    std::set<int> left = {};
    membership::Turns turns = {};
    ReplicaView view = {};
  };
  void Return(int id, const Comes& comes) {
    Account account;
    account.job = comes.job;
    account.scheduler_number = comes.scheduler_number;
    account.is_late = comes.is_late;
    account.left = comes.left;
    account.turns = comes.turns;
    account.replicas = comes.view;
    const bool worker = id % 2 != 0;
    membership::Claim claim;
    claim.protocol = membership::kProtocol;
    claim.workers = comes.workers;
    claim.replicas = worker ? replicas_ : 0;
    Message message;
    message.meta.control.cmd = Control::ADD_NODE;
    message.meta.body = membership::PackRegistration({claim, account});
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
  void AwaitEnd() {
    while (!ended() && failure().empty()) usleep(10'000);
  }
  void SayLeft(int rank) { Say(server_, Control::MEMBERS, Word(membership::LeftKnown{rank})); }
};

TEST_F(SchedulerReturnTest, WhoIsLostBeforeAllHaveComeMayComeAgain) {
  StartAgain(2);
  Return(server_);
  Return(worker_);
  membership_->OnDisconnect(worker_);
  Return(other_);
  EXPECT_EQ(membership_->View().phase, JobView::kGathering);
  Return(worker_, {.scheduler_number = 2});
  EXPECT_EQ(membership_->View().phase, JobView::kRunning);
  EXPECT_EQ(links_.SentTo(worker_, Control::WELCOME).back().meta.body,
            membership::Pack(membership::Welcome{1, 3}));
  EXPECT_EQ(failure(), "");
}

TEST_F(SchedulerReturnTest, OfThoseThatLeftServersTell) {
  StartAgain(2);
  Return(server_, {.left = {0}});
  EXPECT_EQ(membership_->View().phase, JobView::kGathering);
  Return(other_);
  EXPECT_EQ(membership_->View().phase, JobView::kRunning);
  Say(other_, Control::LEAVE, Finish());
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
  Return(worker_, {.scheduler_number = 9});  // this scheduler was cut off: another one has the job
  EXPECT_NE(links_.LastRefusal().find("another scheduler, which began later"), std::string::npos);
  Return(worker_, {.scheduler_number = 2, .token = 99});
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

TEST_F(SchedulerReturnTest, AJobOfWhichServersHeardThatItIsOverEnds) {
  StartAgain(2, 0.3);
  Return(worker_);  // worker 1 has left, which only servers would report
  Say(worker_, Control::LEAVE, Finish());
  AwaitEnd();
  EXPECT_EQ(links_.CountTo(worker_, Control::NODE_LEFT), 1);
  EXPECT_EQ(failure(), "");
}

// ------------------------------------------------------------------ replicas

TEST_F(SchedulerReturnTest, AChangeThatOnlySomeHeardIsToldToAll) {
  // Workers know that replica 1 was removed, the server does not.
  replicas_ = 2;
  StartAgain(4);
  Return(server_, {.view = ReplicaView{4, 0, "11", "00", {0, 0}, {-1, -1}, ""}});
  Return(Id(0), {.view = ReplicaView{4, 1, "10", "00", {0, 0}, {-1, -1}, ""}});
  Return(Id(1));
  EXPECT_EQ(LastTold(server_).epoch, 2);
  EXPECT_EQ(LastTold(server_).present, "10");
  EXPECT_EQ(links_.SentTo(server_, Control::MEMBERS).back().meta.control.node.size(), 2u);
  Register(Node::WORKER, 2, 4, 1);  // not before the server has dropped the old replica
  EXPECT_EQ(links_.LastRefusal().rfind("again: ", 0), 0u);
  Acknowledge();
  Register(Node::WORKER, 2, 4, 1);
  Register(Node::WORKER, 3, 4, 1);
  Say(Id(2), Control::MEMBERS, Word(membership::Ready()));
  Say(Id(3), Control::MEMBERS, Word(membership::Ready()));
  const ReplicaView waits = LastTold(worker_);
  EXPECT_EQ(waits.waiting, "01");
  Say(worker_, Control::MEMBERS, Word(membership::Admit{1, waits.ready_epochs[1]}));
  Acknowledge();
  EXPECT_EQ(LastTold(worker_).present, "11");
  EXPECT_EQ(LastTold(worker_).donors, (std::vector<int>{-1, 0}));
}

TEST_F(SchedulerReturnTest, TheDonorOfOneThatJoinedStaysTheSame) {
  replicas_ = 2;
  StartAgain(4);
  Return(server_, {.view = ReplicaView{4, 6, "11", "00", {4, 0}, {-1, -1}, ""}});
  for (const int rank : {0, 1}) {
    Return(Id(rank), {.is_late = true, .view = ReplicaView{4, 7, "11", "00", {4, 0}, {1, -1}, ""}});
  }
  for (const int rank : {2, 3}) Return(Id(rank));
  EXPECT_EQ(LastTold(worker_).donors, (std::vector<int>{1, -1}));
}

TEST_F(SchedulerReturnTest, OneThatDoesNotKnowThatItWasRemovedIsTold) {
  replicas_ = 2;
  StartAgain(4);
  Return(Id(2));
  Return(server_, {.view = ReplicaView{4, 3, "10", "00", {0, 0}, {-1, -1}, ""}});
  for (const int rank : {0, 1}) Return(Id(rank));
  EXPECT_EQ(links_.CountTo(Id(2), Control::JOB_FAILED), 1);
  EXPECT_EQ(links_.CountTo(Id(0), Control::JOB_FAILED), 0);
  Return(Id(3));
  EXPECT_NE(links_.LastRefusal().find("its replica was removed"), std::string::npos);
}

TEST_F(SchedulerReturnTest, AnAdmissionInFlightIsCompleted) {
  // The server knows of the admission; workers still see the replica waiting.
  replicas_ = 2;
  StartAgain(4);
  const ReplicaView waits{4, 5, "10", "01", {0, 5}, {-1, -1}, ""};
  Return(server_, {.view = ReplicaView{4, 6, "11", "00", {0, 5}, {-1, -1}, ""}});
  for (const int rank : {0, 1}) Return(Id(rank), {.view = waits});
  for (const int rank : {2, 3}) Return(Id(rank), {.is_late = true, .view = waits});
  EXPECT_EQ(LastTold(server_).present, "11");
  EXPECT_EQ(LastTold(worker_).present, "10");
  Acknowledge();
  EXPECT_EQ(LastTold(worker_).present, "11");
  EXPECT_EQ(LastTold(worker_).ready_epochs[1], 5);
}

TEST_F(SchedulerReturnTest, OneThatGathersGoesOnGathering) {
  replicas_ = 2;
  StartAgain(4);
  const ReplicaView removed{4, 4, "10", "00", {0, 2}, {-1, -1}, ""};
  Return(server_, {.view = removed});
  Return(Id(2), {.is_late = true});  // knows nothing yet
  for (const int rank : {0, 1}) Return(Id(rank), {.view = removed});
  Register(Node::WORKER, 3, 4, 1);
  Say(Id(2), Control::MEMBERS, Word(membership::Ready()));
  Say(Id(3), Control::MEMBERS, Word(membership::Ready()));
  EXPECT_EQ(LastTold(worker_).waiting, "01");
  // The server keeps the replica's connections, because they belong to its present workers.
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
  // The worker left while the job had no scheduler, and no other node knows that.
  MembershipSettings settings;
  settings.workers = 4;
  settings.servers = 1;
  settings.scheduler_return_s = 0.2;
  settings.peer_timeout_s = 6;
  settings.start_timeout_s = 600;
  settings.make_roster_policy = MakeRosterRecovery;
  membership_ = std::make_unique<SchedulerMembership>(
      &links_, settings, [this](const MembershipEvent& e) { OnEvent(e); });
  membership_->Join();
  Return(server_, {.left = {0, 1, 2}, .view = ReplicaView{4, 0, "11", "00", {0, 0}, {-1, -1}, ""}});
  EXPECT_FALSE(ended());
  AwaitEnd();
  EXPECT_EQ(failure(), "");
  EXPECT_TRUE(ended());
}

TEST_F(SchedulerReturnTest, WhatHasHeardThatTheJobIsOverNeedsNotComeBack) {
  MembershipSettings settings;
  settings.workers = 2;
  settings.servers = 2;
  settings.scheduler_return_s = 0.2;
  settings.make_roster_policy = MakeRosterRecovery;
  membership_ = std::make_unique<SchedulerMembership>(
      &links_, settings, [this](const MembershipEvent& e) { OnEvent(e); });
  membership_->Join();
  Return(server_, {.left = {0}});
  Return(other_);
  Say(other_, Control::LEAVE, Finish());
  AwaitEnd();
  EXPECT_EQ(failure(), "");
  EXPECT_EQ(links_.CountTo(other_, Control::NODE_LEFT), 1);
  EXPECT_EQ(links_.CountTo(other_, Control::JOB_FAILED), 0);
  EXPECT_EQ(links_.CountTo(server_, Control::JOB_END), 1);
}

// ----- jobs whose servers are replaced

TEST_F(SchedulerReturnTest, APlaceThatWasVacantIsFilled) {
  StartAgain(2, 600, 600);
  Return(worker_, {.turns = {{0, 1}}});
  Return(other_);
  LastWord<membership::ServerLost>(other_);  // this worker may not know yet
  EXPECT_EQ(LastWord<membership::ServerLost>(other_).turn, 1);
  Register(Node::SERVER, -1, -1, 1);
  for (const int id : {worker_, other_}) {
    LastWord<membership::ServerReplaced>(id);
    EXPECT_EQ(LastWord<membership::ServerReplaced>(id).turn, 2);
  }
  const auto told = links_.SentTo(server_, Control::ADD_NODE).back();
  EXPECT_EQ(membership::Parse<membership::Beginning>(told.meta.body)->turns,
            (membership::Turns{{0, 2}}));
  EXPECT_EQ(membership_->View().phase, JobView::kRunning);
  EXPECT_EQ(failure(), "");
}

TEST_F(SchedulerReturnTest, WhoHasTheVacantPlaceLostItForGood) {
  StartAgain(2, 600, 600);
  Return(server_);
  Return(worker_, {.turns = {{0, 1}}});
  Return(other_, {.turns = {{0, 1}}});
  EXPECT_EQ(links_.SentTo(server_, Control::JOB_FAILED).back().meta.body,
            "server 0 (10.0.0.2:9001) cannot go on: it was lost to the job, and another server may "
            "have its place");
  Return(server_);
  EXPECT_NE(links_.LastRefusal().find("the job goes on without it"), std::string::npos);
  EXPECT_EQ(failure(), "");
}

TEST_F(SchedulerReturnTest, OfAServerThatWasReplacedAllHear) {
  StartAgain(2, 600, 600);
  Return(server_, {.token = 5});
  Return(server_, {.token = 6, .turns = {{0, 2}}});
  EXPECT_EQ(links_.LastRefusal().rfind("again: ", 0), 0u) << "the one before gives way";
  Return(server_, {.token = 5});
  EXPECT_NE(links_.LastRefusal().find("another process has its place"), std::string::npos);
  Return(worker_);
  Return(other_, {.turns = {{0, 1}}});
  for (const int id : {worker_, other_}) {
    LastWord<membership::ServerReplaced>(id);
    EXPECT_EQ(LastWord<membership::ServerReplaced>(id).turn, 2);
    const auto nodes = links_.SentTo(id, Control::MEMBERS).back().meta.control.node;
    EXPECT_EQ(TokenOf(nodes.at(0)), 6u);
  }
}

TEST_F(SchedulerReturnTest, AServerThatStaysAwayIsReplaced) {
  StartAgain(2, 0.3, 600);
  Return(worker_);
  Return(other_);
  const auto words = links_.Await(other_, Control::MEMBERS, 1);
  LastWord<membership::ServerLost>(other_);
  EXPECT_EQ(LastWord<membership::ServerLost>(other_).reason.find(
                "server 0 (unknown) did not come back to the scheduler"),
            0u);
  EXPECT_EQ(failure(), "");
}

TEST_F(SchedulerReturnTest, WhoStaysForOthersGoesWhenServersKnow) {
  StartAgain(2, 600, 600);
  for (const int id : {server_, worker_, other_}) Return(id);
  Say(worker_, Control::LEAVE, Finish());
  Say(other_, Control::LEAVE, Finish());
  EXPECT_EQ(links_.CountTo(worker_, Control::NODE_LEFT), 0) << "the server does not know yet";
  SayLeft(0);
  EXPECT_EQ(links_.CountTo(worker_, Control::NODE_LEFT), 1);
  EXPECT_FALSE(ended());
  SayLeft(1);
  EXPECT_EQ(links_.CountTo(other_, Control::NODE_LEFT), 1);
  EXPECT_TRUE(ended());
}

TEST_F(SchedulerReturnTest, WhenAllHaveLeftNoServerIsWaitedFor) {
  StartAgain(2, 600, 600);
  for (const int id : {server_, worker_, other_}) Return(id);
  Say(worker_, Control::LEAVE, Finish());
  membership_->OnDisconnect(server_);
  EXPECT_FALSE(ended());
  Say(other_, Control::LEAVE, Finish());
  EXPECT_TRUE(ended());
  EXPECT_EQ(failure(), "");
}

}  // namespace
}  // namespace ps
