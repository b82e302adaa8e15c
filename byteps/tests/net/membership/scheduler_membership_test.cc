// Whom the scheduler admits, hears, misses, and what it tells the others.
#include <memory>
#include <set>
#include <string>

#include "tests/net/membership/scheduler_test.h"

namespace ps {
namespace {

TEST_F(SchedulerMembershipTest, WhoIsRefusedChangesNothing) {
  StartKept(1);
  const struct {
    int rank, workers, servers;
    const char* why;
  } wrong[] = {
      {0, 3, 4, "started for 4 servers, the scheduler for 1 server"},
      {5, 3, 1, "rank 5 is not below the number of workers, 3"},
      {7, 2, 9, "started for 9 servers"},
  };
  for (const auto& node : wrong) {
    Register(Node::WORKER, node.rank, node.workers, node.servers);
    EXPECT_NE(links_.LastRefusal().find(node.why), std::string::npos) << links_.LastRefusal();
    EXPECT_EQ(membership_->View().workers, -1);
    EXPECT_TRUE(membership_->View().peers.empty());
  }
  GatherNodes();
}

TEST_F(SchedulerMembershipTest, AReplicaIsRemovedAndComesBack) {
  GatherReplicas();
  membership_->OnDisconnect(IdOf(Node::WORKER, 3));
  EXPECT_EQ(failure(), "") << "the others go on";
  ReplicaView view = LastTold(server_);
  EXPECT_EQ(view.present, "10");
  EXPECT_EQ(view.AbsentRanks(), (std::set<int>{2, 3}));
  EXPECT_EQ(view.news.find("replica 1 was removed: worker 3 (10.0.0.2) was lost"), 0u) << view.news;
  EXPECT_EQ(links_.SentTo(server_, Control::MEMBERS).back().meta.control.node.size(), 2u);
  EXPECT_EQ(LastTold(worker_).present, "10");
  EXPECT_EQ(links_.CountTo(IdOf(Node::WORKER, 2), Control::JOB_FAILED), 1) << "it goes as well";
  EXPECT_EQ(links_.CountTo(other_, Control::JOB_FAILED), 0);

  Register(Node::WORKER, 2, 4, 1);
  EXPECT_EQ(links_.LastRefusal().find("again: "), 0u) << "servers have not acknowledged it";
  Acknowledge();
  Register(Node::WORKER, 2, 4, 1);
  Say(IdOf(Node::WORKER, 2), Control::MEMBERS,
      membership::PackWord({membership::MemberWord::kReady}));
  EXPECT_EQ(links_.CountTo(IdOf(Node::WORKER, 2), Control::ADD_NODE), 1) << "one is missing";
  Register(Node::WORKER, 3, 4, 1);
  const auto added = links_.SentTo(IdOf(Node::WORKER, 3), Control::ADD_NODE);
  ASSERT_EQ(added.size(), 2u);
  EXPECT_TRUE(membership::ParseBeginning(added.back().meta.body).late);
  Say(IdOf(Node::WORKER, 3), Control::MEMBERS,
      membership::PackWord({membership::MemberWord::kReady}));
  view = LastTold(worker_);
  EXPECT_EQ(view.waiting, "01");
  EXPECT_EQ(view.present, "10");
  const int life = view.lives[1];
  EXPECT_EQ(life, view.epoch);

  Say(worker_, Control::MEMBERS,
      membership::PackWord({membership::MemberWord::kAdmit, 1, life - 1}));
  EXPECT_EQ(LastTold(server_).present, "10") << "that life of it does not wait";
  Say(worker_, Control::MEMBERS, membership::PackWord({membership::MemberWord::kAdmit, 1, life}));
  EXPECT_EQ(LastTold(server_).present, "11");
  EXPECT_EQ(LastTold(worker_).present, "10") << "the server has not acknowledged it";
  Acknowledge();
  EXPECT_EQ(LastTold(worker_).present, "11");
  EXPECT_EQ(LastTold(IdOf(Node::WORKER, 3)).present, "11");
  EXPECT_EQ(membership_->View().replicas.present, "11");
  for (int rank = 0; rank < 4; ++rank) Say(IdOf(Node::WORKER, rank), Control::LEAVE, "finish");
  EXPECT_TRUE(ended());
}

TEST_F(SchedulerMembershipTest, OneThatIsLateIsRemoved) {
  GatherReplicas();
  const int late = IdOf(Node::WORKER, 2);
  Say(server_, Control::MEMBERS, membership::PackWord({MemberWord::kAwaited, 2, 7, "outer"}));
  const auto told = links_.SentTo(late, Control::MEMBERS);
  ASSERT_EQ(told.size(), 1u);
  MemberWord word;
  ASSERT_TRUE(membership::ParseWord(told[0].meta.body, &word));
  EXPECT_EQ(word.text, "outer");
  EXPECT_EQ(word.epoch, 7);
  EXPECT_EQ(links_.CountTo(worker_, Control::MEMBERS), 0);

  for (const int rank : {-1, 4, 1 << 20}) {
    Say(server_, Control::MEMBERS, membership::PackWord({MemberWord::kLate, rank, 0, "why"}));
  }
  // No worker says so of another one.
  Say(worker_, Control::MEMBERS, membership::PackWord({MemberWord::kLate, 2, 0, "why"}));
  EXPECT_EQ(links_.CountTo(worker_, Control::MEMBERS), 0);
  Say(server_, Control::MEMBERS, membership::PackWord({MemberWord::kLate, 2, 0, "it was late"}));
  EXPECT_EQ(LastTold(worker_).present, "10");
  EXPECT_EQ(LastTold(worker_).news, "replica 1 was removed: it was late");
  EXPECT_EQ(links_.CountTo(late, Control::JOB_FAILED), 1);
  // The last one stays.
  Say(server_, Control::MEMBERS, membership::PackWord({MemberWord::kLate, 0, 1, "it was late"}));
  EXPECT_EQ(LastTold(server_).present, "10");
  EXPECT_EQ(failure(), "");
}

TEST_F(SchedulerMembershipTest, TheLastReplicaFailsTheJob) {
  GatherReplicas();
  Say(IdOf(Node::WORKER, 0), Control::LEAVE, "failed: exit status 3");
  EXPECT_EQ(failure(), "");
  EXPECT_EQ(LastTold(server_).present, "01");
  membership_->OnDisconnect(IdOf(Node::WORKER, 2));
  EXPECT_NE(failure().find("worker 2 (10.0.0.2) was lost"), std::string::npos) << failure();
}

TEST_F(SchedulerMembershipTest, AServerTellsWhichWorkerItLost) {
  GatherReplicas();
  Message message;
  message.meta.control.cmd = Control::JOB_FAILED;
  message.meta.sender = server_;
  message.meta.body = "worker 1 was lost to server 0";
  Node node;
  node.id = IdOf(Node::WORKER, 1);
  node.role = Node::WORKER;
  message.meta.control.node = {node};
  membership_->Handle(message);
  EXPECT_EQ(failure(), "");
  EXPECT_EQ(LastTold(server_).present, "01");
}

TEST_F(SchedulerMembershipTest, AJobEndsWithoutThoseWhoWaitToJoin) {
  GatherReplicas();
  membership_->OnDisconnect(IdOf(Node::WORKER, 3));
  Acknowledge();
  for (const int rank : {2, 3}) Register(Node::WORKER, rank, 4, 1);
  for (const int rank : {0, 1}) Say(IdOf(Node::WORKER, rank), Control::LEAVE, "finish");
  EXPECT_TRUE(ended());
  const auto told = links_.SentTo(IdOf(Node::WORKER, 3), Control::JOB_FAILED);
  ASSERT_FALSE(told.empty());
  EXPECT_EQ(told.back().meta.body, "the job ended before this replica had joined it");
}

TEST_F(SchedulerMembershipTest, NodesHearOfNics) {
  Gather();
  const auto to_server = links_.SentTo(server_, Control::ADD_NODE);
  ASSERT_EQ(to_server.size(), 1u);
  EXPECT_TRUE(to_server[0].meta.control.node.empty()) << "the scheduler has one NIC";
  const auto to_worker = links_.SentTo(worker_, Control::ADD_NODE);
  ASSERT_EQ(to_worker.size(), 1u);
  ASSERT_EQ(to_worker[0].meta.control.node.size(), 1u);
  ASSERT_EQ(to_worker[0].meta.control.node[0].nics.size(), 2u) << "those that the server told of";
  EXPECT_EQ(to_worker[0].meta.control.node[0].nics[1].address, "10.1.0.2");
}

TEST_F(SchedulerMembershipTest, NodesHearOfTheSchedulersNics) {
  Node self = links_.self();
  self.nics = {{"10.0.0.1", 24, 0}, {"10.1.0.1", 24, 0}};
  links_.SetSelf(self);
  Gather();
  for (const int id : {server_, worker_, other_}) {
    const auto told = links_.SentTo(id, Control::ADD_NODE);
    ASSERT_EQ(told.size(), 1u);
    const auto& nodes = told[0].meta.control.node;
    ASSERT_EQ(nodes.size(), id == server_ ? 1u : 2u);
    EXPECT_EQ(nodes[0].role, Node::SCHEDULER);
    EXPECT_EQ(nodes[0].nics.size(), 2u);
  }
}

TEST_F(SchedulerMembershipTest, WhoComesBeforeItJoinsIsAdmitted) {
  MembershipSettings settings;
  settings.workers = settings.servers = 1;
  Listen(settings);
  Register(Node::WORKER, 0, 1, 1);
  EXPECT_EQ(links_.LastRefusal(), "");
  EXPECT_EQ(links_.CountTo(worker_, Control::WELCOME), 1);
  membership_->Join();
  Register(Node::SERVER, -1, -1, 1);
  EXPECT_EQ(membership_->View().phase, JobView::kRunning);
}

TEST_F(SchedulerMembershipTest, AFailureBeforeItJoinsLasts) {
  Listen(MembershipSettings());
  membership_->StopByOrder("stopped by SIGTERM");
  membership_->Join();
  EXPECT_EQ(membership_->View().phase, JobView::kFailed);
}

TEST_F(SchedulerMembershipTest, AFailureWhileANodeIsAdmittedReachesIt) {
  StartKept(1);
  Register(Node::SERVER, -1, -1, 1);
  Register(Node::WORKER, 0, 2, 1);
  links_.on_connect = [this](const Node& node) {
    if (node.id != other_) return;
    links_.on_connect = nullptr;
    membership_->OnDisconnect(worker_);  // as the timer's thread may find
  };
  Register(Node::WORKER, 1, 2, 1);
  EXPECT_NE(failure().find("worker 0"), std::string::npos);
  EXPECT_EQ(links_.CountTo(other_, Control::WELCOME), 0);
  EXPECT_NE(links_.LastRefusal().find("again: "), std::string::npos) << links_.LastRefusal();
  EXPECT_TRUE(membership_->View().peers.empty());
  GatherNodes();
}

TEST_F(SchedulerMembershipTest, MembersCannotSayWhatTheSchedulerSays) {
  Gather();
  for (const int sender : {server_, worker_}) {
    for (const auto command :
         {Control::JOB_END, Control::TERMINATE, Control::WELCOME, Control::REFUSED,
          Control::NODE_LEFT, Control::ADD_NODE, Control::BARRIER, Control::EMPTY}) {
      Say(sender, command, "finish");
    }
  }
  EXPECT_FALSE(ended());
  EXPECT_EQ(failure(), "");
  EXPECT_EQ(membership_->View().phase, JobView::kRunning);
}

TEST_F(SchedulerMembershipTest, EachRoleLeavesInItsOwnWay) {
  Gather();
  Say(server_, Control::LEAVE, "finish");
  Say(worker_, Control::LEAVE, "stopped by SIGTERM");
  for (const auto& peer : membership_->View().peers) EXPECT_FALSE(peer.left);
  EXPECT_EQ(failure(), "");
  Say(worker_, Control::LEAVE, "finish");
  EXPECT_FALSE(ended());
  Say(other_, Control::LEAVE, "finish");
  EXPECT_TRUE(ended());
  EXPECT_EQ(links_.CountTo(server_, Control::JOB_END), 1);
}

TEST_F(SchedulerMembershipTest, AWorkerThatFailsFailsTheJob) {
  Gather();
  Say(worker_, Control::LEAVE, "finish");
  EXPECT_EQ(failure(), "");
  Say(other_, Control::LEAVE, "failed: exit status 3");
  EXPECT_EQ(failure(), "worker 1 (10.0.0.2) failed: exit status 3");
  EXPECT_FALSE(ended());
  EXPECT_EQ(links_.CountTo(server_, Control::JOB_FAILED), 1);
  EXPECT_EQ(links_.CountTo(server_, Control::JOB_END), 0);
}

TEST_F(SchedulerMembershipTest, AnOperationThatFailedIsTheWorkersAffair) {
  Gather();
  Say(worker_, Control::LEAVE, "suspend after: push_pull of 'a' timed out");
  Say(other_, Control::LEAVE, "suspend after: push_pull of 'a' timed out");
  EXPECT_EQ(failure(), "");
  EXPECT_TRUE(ended());
  EXPECT_EQ(membership_->View().incarnation, 2) << "it was suspended";
}

TEST_F(SchedulerMembershipTest, ToAKeptClusterItIsAFailure) {
  StartKept(1);
  GatherNodes();
  Say(worker_, Control::LEAVE, "finish after: push_pull of 'a' timed out");
  EXPECT_EQ(failure(), "worker 0 (10.0.0.2) failed: push_pull of 'a' timed out");
}

TEST_F(SchedulerMembershipTest, OnlyMembersAreHeard) {
  Gather();
  Say(Postoffice::WorkerRankToID(5), Control::LEAVE, "stopped");
  Say(Postoffice::WorkerRankToID(5), Control::JOB_FAILED, "nonsense");
  EXPECT_EQ(failure(), "");
  Say(worker_, Control::JOB_FAILED, "server 0 was lost to worker 0");
  EXPECT_EQ(failure(), "server 0 was lost to worker 0");
}

}  // namespace
}  // namespace ps
