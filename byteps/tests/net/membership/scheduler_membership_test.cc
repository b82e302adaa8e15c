// Tests of the scheduler's side: admission, liveness, messages, and servers with links to each
// other.
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/net/membership/membership_test.h"

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
    EXPECT_EQ(links_.unlinked(), links_.linked()) << "its link was kept";
  }
  GatherNodes();
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
    membership_->OnDisconnect(worker_);  // the heartbeat thread may do this
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
  Say(server_, Control::LEAVE, Finish());
  Say(worker_, Control::LEAVE, Stopped("stopped by SIGTERM"));
  for (const auto& peer : membership_->View().peers) EXPECT_FALSE(peer.left);
  EXPECT_EQ(failure(), "");
  Say(worker_, Control::LEAVE, Finish());
  EXPECT_FALSE(ended());
  Say(other_, Control::LEAVE, Finish());
  EXPECT_TRUE(ended());
  EXPECT_EQ(links_.CountTo(server_, Control::JOB_END), 1);
}

TEST_F(SchedulerMembershipTest, AWorkerThatFailsFailsTheJob) {
  Gather();
  Say(worker_, Control::LEAVE, Finish());
  EXPECT_EQ(failure(), "");
  Say(other_, Control::LEAVE, Failed("exit status 3"));
  EXPECT_EQ(failure(), "worker 1 (10.0.0.2) failed: exit status 3");
  EXPECT_FALSE(ended());
  EXPECT_EQ(links_.CountTo(server_, Control::JOB_FAILED), 1);
  EXPECT_EQ(links_.CountTo(server_, Control::JOB_END), 0);
}

TEST_F(SchedulerMembershipTest, AnOperationThatFailedIsTheWorkersAffair) {
  Gather();
  Say(worker_, Control::LEAVE, Suspend("push_pull of 'a' timed out"));
  Say(other_, Control::LEAVE, Suspend("push_pull of 'a' timed out"));
  EXPECT_EQ(failure(), "");
  EXPECT_TRUE(ended());
  EXPECT_EQ(membership_->View().generation, 2) << "it was suspended";
}

TEST_F(SchedulerMembershipTest, ToAKeptClusterItIsAFailure) {
  StartKept(1);
  GatherNodes();
  Say(worker_, Control::LEAVE, Finish("push_pull of 'a' timed out"));
  EXPECT_EQ(failure(), "worker 0 (10.0.0.2) failed: push_pull of 'a' timed out");
}

TEST_F(SchedulerMembershipTest, AServerAtALoopbackAddressServesItsMachineAlone) {
  MembershipSettings settings;
  settings.workers = 1;
  settings.servers = 1;
  Start(settings);
  Register(Node::SERVER, -1, -1, 1, "127.0.0.1");
  Register(Node::WORKER, 0, 1, 1, "192.0.2.77");
  EXPECT_EQ(failure(),
            "server 0 (127.0.0.1:9001) listens at a loopback address, which worker 0 (192.0.2.77) "
            "cannot reach: the scheduler's name stands for it on that server's machine; set "
            "DMLC_NODE_HOST there to an address of the machine");
  EXPECT_EQ(links_.CountTo(worker_, Control::JOB_FAILED), 1);
}

TEST_F(SchedulerMembershipTest, AJobOfOneMachineMayUseLoopback) {
  MembershipSettings settings;
  settings.workers = 1;
  settings.servers = 1;
  Start(settings);
  Register(Node::SERVER, -1, -1, 1, "127.0.0.1");
  Register(Node::WORKER, 0, 1, 1, "127.0.0.1");
  EXPECT_EQ(failure(), "");
}

TEST_F(SchedulerMembershipTest, HasWorkersOnceAJobHasBegunUntilTheyHaveLeft) {
  MembershipSettings settings;
  settings.workers = 2;
  settings.servers = 1;
  Start(settings);
  Register(Node::WORKER, 0, 2, 1);
  EXPECT_FALSE(membership_->HasWorkers()) << "they have nothing to save";
  Register(Node::SERVER, -1, -1, 1);
  Register(Node::WORKER, 1, 2, 1);
  EXPECT_TRUE(membership_->HasWorkers());
  Say(worker_, Control::LEAVE, Finish());
  EXPECT_TRUE(membership_->HasWorkers());
  Say(other_, Control::LEAVE, Finish());
  EXPECT_FALSE(membership_->HasWorkers());
}

TEST_F(SchedulerMembershipTest, ALossEndsTheJobWhateverTheSettingsAllow) {
  replicas_ = 2;
  GatherReplacing();
  Register(Node::SERVER, -1, -1, 1);
  EXPECT_NE(links_.LastRefusal().find(membership::kAgain), 0u) << "it need not wait for a place";
  membership_->OnDisconnect(worker_);
  EXPECT_EQ(failure(), "worker 0 (10.0.0.2) was lost: its connection closed");
  for (const int id : {server_, other_}) EXPECT_EQ(links_.CountTo(id, Control::JOB_FAILED), 1);
}

TEST_F(SchedulerMembershipTest, OnlyMembersAreHeard) {
  Gather();
  Say(Postoffice::WorkerRankToID(5), Control::LEAVE, Stopped("stopped"));
  Say(Postoffice::WorkerRankToID(5), Control::JOB_FAILED, "nonsense");
  EXPECT_EQ(failure(), "");
  Say(worker_, Control::JOB_FAILED, "server 0 was lost to worker 0");
  EXPECT_EQ(failure(), "server 0 was lost to worker 0");
}

// ----- servers with links to each other: attribution of broken links

using Ranks = std::vector<int>;

TEST_F(NeighborsTest, AServerIsToldOfItsNeighbors) {
  GatherServers(4);
  EXPECT_EQ(Told(0), (Ranks{1, 3}));
  EXPECT_EQ(Told(1), (Ranks{0, 2}));
  EXPECT_EQ(Told(3), (Ranks{0, 2}));
}

TEST_F(NeighborsTest, AllNodesHaveTheSameSetting) {
  MembershipSettings settings;
  settings.servers = 2;
  settings.backups = true;
  Start(settings);
  Register(Node::SERVER, -1, -1, 2);
  EXPECT_NE(links_.LastRefusal().find("BYTEPS_BACKUP_STATE is set on the scheduler, and not there"),
            std::string::npos)
      << links_.LastRefusal();
}

TEST_F(NeighborsTest, OfTwoServersEachIsTheOthers) {
  GatherServers(2);
  EXPECT_EQ(Told(0), Ranks{1});
  EXPECT_EQ(Told(1), Ranks{0});
}

TEST_F(NeighborsTest, ServersLeaveOneByOneWhenTheJobHasEnded) {
  GatherServers(2);
  Say(worker_, Control::LEAVE, Finish());
  ASSERT_TRUE(ended());
  Accuse(Id(0), Id(1), 9001, "server 1 was lost to server 0");
  membership_->OnDisconnect(Id(1));
  EXPECT_EQ(CountWords(0), 0);
  EXPECT_EQ(failure(), "");
}

}  // namespace
}  // namespace ps
