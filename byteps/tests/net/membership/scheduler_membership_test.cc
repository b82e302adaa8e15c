// Whom the scheduler admits, hears, misses, and what it tells the others, servers with links
// between them included.
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
  AccuseWorker(IdOf(Node::WORKER, 1));
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

// ----- servers that have links with each other: whose loss it is where such a link breaks

class NeighborsTest : public SchedulerMembershipTest {
 protected:
  void GatherServers(int servers, bool backups = true) {
    servers_ = servers;
    MembershipSettings settings;
    settings.workers = 1;
    settings.servers = servers;
    settings.replace_servers_s = 600;
    settings.backups = backups_ = backups;
    Start(settings);
    for (int i = 0; i < servers; ++i) Come();
    Register(Node::WORKER, 0, 1, servers);
    ASSERT_EQ(membership_->View().phase, JobView::kRunning);
  }
  void Come() { Register(Node::SERVER, -1, -1, servers_); }
  static int Id(int rank) { return Postoffice::ServerRankToID(rank); }
  // Ranks of the servers that this one was told of when it joined.
  std::vector<int> Told(int rank) {
    std::vector<int> ranks;
    const Message told = links_.SentTo(Id(rank), Control::ADD_NODE).back();
    for (const Node& node : told.meta.control.node) {
      EXPECT_EQ(node.role, Node::SERVER);
      ranks.push_back(Postoffice::IDtoRank(node.id));
    }
    return ranks;
  }
  void ExpectWord(int rank, MemberWord::Kind kind, int about) {
    const MemberWord word = LastWord(Id(rank));
    EXPECT_EQ(word.kind, kind) << rank;
    EXPECT_EQ(word.number, about) << rank;
  }
  int CountWords(int rank) { return links_.CountTo(Id(rank), Control::MEMBERS); }

  int servers_ = 0;
};

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

TEST_F(NeighborsTest, WithoutCopiesServersMeetNobody) {
  GatherServers(2, false);
  EXPECT_EQ(Told(0), Ranks());
  membership_->OnDisconnect(Id(1));
  Come();
  EXPECT_EQ(Told(1), Ranks());
  ExpectWord(0, MemberWord::kServerReplaced, 1);  // as the workers do, so that none is late
  EXPECT_EQ(LastWord(worker_).kind, MemberWord::kServerReplaced);
}

TEST_F(NeighborsTest, TheOthersHearThatAServerIsLostAndReplaced) {
  GatherServers(4);
  membership_->OnDisconnect(Id(1));
  for (const int rank : {0, 2, 3}) ExpectWord(rank, MemberWord::kServerLost, 1);
  EXPECT_EQ(CountWords(1), 0);
  Come();
  EXPECT_EQ(Told(1), (Ranks{0, 2}));
  EXPECT_EQ(CountWords(1), 0) << "of itself there is no news";
  for (const int rank : {0, 2, 3}) {
    ExpectWord(rank, MemberWord::kServerReplaced, 1);
    EXPECT_EQ(LastWord(Id(rank)).epoch, 4) << "so it knows its neighbors";
    const auto told = links_.SentTo(Id(rank), Control::MEMBERS);
    EXPECT_EQ(told.back().meta.control.node.at(0).id, Id(1));
  }
  EXPECT_EQ(failure(), "");
}

TEST_F(NeighborsTest, AServerThatComesHearsWhoIsLost) {
  GatherServers(3);
  membership_->OnDisconnect(Id(1));
  membership_->OnDisconnect(Id(2));
  Come();
  EXPECT_EQ(Told(1), Ranks{0});
  ExpectWord(1, MemberWord::kServerLost, 2);
  Come();
  EXPECT_EQ(Told(2), (Ranks{0, 1}));
  ExpectWord(1, MemberWord::kServerReplaced, 2);
  ExpectWord(0, MemberWord::kServerReplaced, 2);
}

TEST_F(NeighborsTest, WhoAccusesAServerThatIsHeardIsLost) {
  GatherServers(2);
  Accuse(Id(0), Id(1), 9001, "server 1 was lost to server 0");
  EXPECT_EQ(CountWords(1), 0) << "nobody is lost yet";
  Say(Id(1), Control::HEARTBEAT, "");
  ExpectWord(1, MemberWord::kServerLost, 0);
  EXPECT_EQ(LastWord(Id(1)).text,
            "server 0 (10.0.0.2:9001) cannot go on: server 1 was lost to server 0");
  EXPECT_EQ(LastWord(worker_).number, 0);
  EXPECT_EQ(failure(), "");
}

TEST_F(NeighborsTest, AServerThatIsAccusedAndNotHeardIsLost) {
  GatherServers(2);
  Accuse(Id(0), Id(1), 9001, "server 1 was lost to server 0");
  links_.Await(Id(0), Control::MEMBERS, 1);  // for some seconds
  ExpectWord(0, MemberWord::kServerLost, 1);
  EXPECT_EQ(failure(), "");
}

TEST_F(NeighborsTest, OfTwoThatAccuseEachOtherOneIsLost) {
  GatherServers(2);
  Accuse(Id(0), Id(1), 9001, "server 1 was lost to server 0");
  Accuse(Id(1), Id(0), 9001, "server 0 was lost to server 1");
  ExpectWord(1, MemberWord::kServerLost, 0);
  Come();
  ExpectWord(1, MemberWord::kServerReplaced, 0);
  Say(Id(1), Control::HEARTBEAT, "");
  Say(Id(0), Control::HEARTBEAT, "");
  EXPECT_EQ(CountWords(0), 0) << "its place is another's by now";
  EXPECT_EQ(failure(), "");
}

TEST_F(NeighborsTest, WhoIsLostAccusesNobodyAnyMore) {
  GatherServers(3);
  Accuse(Id(0), Id(1), 9001, "server 1 was lost to server 0");
  membership_->OnDisconnect(Id(0));
  Come();
  Say(Id(1), Control::HEARTBEAT, "");
  ExpectWord(1, MemberWord::kServerReplaced, 0);
  EXPECT_EQ(links_.CountTo(worker_, Control::MEMBERS), 2) << "one was lost, and one has its place";
}

TEST_F(NeighborsTest, AReportOfALinkWithAnEarlierServerIsNoNews) {
  GatherServers(2);
  membership_->OnDisconnect(Id(1));
  Accuse(Id(0), Id(1), 9001, "server 1 was lost to server 0");
  Come();
  Accuse(Id(0), Id(1), 9002, "server 1 was lost to server 0");
  Say(Id(1), Control::HEARTBEAT, "");
  ExpectWord(0, MemberWord::kServerReplaced, 1);
  EXPECT_EQ(CountWords(1), 0);
  EXPECT_EQ(failure(), "");
}

TEST_F(NeighborsTest, ServersLeaveOneByOneWhenTheJobHasEnded) {
  GatherServers(2);
  Say(worker_, Control::LEAVE, "finish");
  ASSERT_TRUE(ended());
  Accuse(Id(0), Id(1), 9001, "server 1 was lost to server 0");
  membership_->OnDisconnect(Id(1));
  EXPECT_EQ(CountWords(0), 0);
  EXPECT_EQ(failure(), "");
}

}  // namespace
}  // namespace ps
