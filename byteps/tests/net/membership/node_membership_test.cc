// Tests of a node's side of membership without a network.
#include "byteps/net/membership/node_membership.h"

#include <set>
#include <string>
#include <vector>

#include "tests/net/membership/node_test.h"

namespace ps {
namespace {

TEST_F(NodeMembershipTest, LearnsOfTheSchedulersNics) {
  Make(Node::WORKER);
  Node scheduler = links_->scheduler();
  scheduler.nics = {{"10.0.0.1", 24, 0}, {"10.1.0.1", 24, 0}};
  std::vector<std::string> told;
  links_->on_connect = [&](const Node& node) {
    for (const Nic& nic : node.nics) told.push_back(nic.address);
  };
  answers_[Control::ADD_NODE] = [&] {
    Welcome();
    Say(Control::ADD_NODE, membership::Pack(membership::Beginning{25'000, false, {}}),
        {scheduler, Server()});
  };
  membership_->Join();
  EXPECT_EQ(told, std::vector<std::string>({"10.0.0.1", "10.1.0.1"}));
  EXPECT_EQ(links_->linked(), std::vector<int>({kScheduler, server_}));
}

TEST_F(NodeMembershipTest, AWorkerJoins) {
  Make(Node::WORKER);
  answers_[Control::ADD_NODE] = [this] {
    Welcome(3);
    Say(Control::ADD_NODE, membership::Pack(membership::Beginning{25'000, false, {}}), {Server()});
  };
  membership_->Join();
  const auto claims = links_->SentTo(kScheduler, Control::ADD_NODE);
  ASSERT_EQ(claims.size(), 1u);
  EXPECT_EQ(Claimed().workers, 2);
  EXPECT_EQ(Claimed().servers, 1);
  EXPECT_EQ(Claimed().link_mbps, 40'000);
  EXPECT_EQ(Claimed().replicas, 1);
  ASSERT_EQ(claims[0].meta.control.node.size(), 1u);
  EXPECT_EQ(claims[0].meta.control.node[0].aux_id, 0) << "the launcher's rank";
  EXPECT_EQ(links_->self().id, worker_);
  EXPECT_EQ(links_->generation(), 3);
  EXPECT_EQ(links_->linked(), std::vector<int>{server_});
  EXPECT_EQ(membership_->link_mbps(), 25'000);
  EXPECT_EQ(membership_->NameOf(server_), "server 0 (10.0.0.3:9001)");
  EXPECT_EQ(membership_->NameOf(kScheduler), "scheduler (10.0.0.1:9000)");
  EXPECT_EQ(membership_->NameOf(Postoffice::WorkerRankToID(7)), "worker 7");
  EXPECT_TRUE(Heard(MembershipEvent::kWelcomed));
}

TEST_F(NodeMembershipTest, AServerThatOutlivesJobsTakesAnyNumberOfWorkers) {
  settings_.keep = true;
  JoinAs(Node::SERVER);
  EXPECT_EQ(Claimed().workers, -1);
  EXPECT_EQ(Claimed().servers, 1);
  EXPECT_EQ(Claimed().link_mbps, 0);
  settings_.rejoin = true;
  JoinAs(Node::SERVER);
  EXPECT_EQ(Claimed().workers, -1);
  EXPECT_EQ(Claimed().servers, -1);
}

TEST_F(NodeMembershipTest, ARefusalEndsJoin) {
  Make(Node::WORKER);
  answers_[Control::ADD_NODE] = [this] { Say(Control::REFUSED, "worker 0 was refused"); };
  EXPECT_EQ(JoinThrows<Error>(), "worker 0 was refused");
  EXPECT_EQ(Await(MembershipEvent::kFailed).reason, "worker 0 was refused");

  Make(Node::WORKER);
  answers_[Control::ADD_NODE] = [this] { Say(Control::REFUSED, "again: the job has ended"); };
  EXPECT_EQ(JoinThrows<ComeAgain>(), "the job has ended");
  EXPECT_FALSE(Heard(MembershipEvent::kFailed)) << "nothing has failed yet";
}

TEST_F(NodeMembershipTest, AProbeEndsWithItsAnswer) {
  settings_.probe = 2;
  Make(Node::WORKER);
  answers_[Control::ADD_NODE] = [this] {
    Say(Control::REFUSED, "would: 1 server and 0 workers are there");
  };
  EXPECT_EQ(JoinThrows<WouldBeAdmitted>(), "1 server and 0 workers are there");
  Make(Node::WORKER);
  answers_[Control::ADD_NODE] = [this] { Say(Control::REFUSED, "again: it has failed"); };
  EXPECT_EQ(JoinThrows<ComeAgain>(), "it has failed");
  Make(Node::WORKER);
  answers_[Control::ADD_NODE] = [this] { Say(Control::REFUSED, "worker 0 would be refused"); };
  EXPECT_EQ(JoinThrows<Error>(), "worker 0 would be refused");
  EXPECT_FALSE(Heard(MembershipEvent::kFailed)) << "only Join tells";
}

TEST_F(NodeMembershipTest, ASchedulerThatDoesNotAnswerIsNamed) {
  settings_.start_timeout_s = 0.05;
  Make(Node::WORKER);
  links_->SetDialError("connection refused");
  EXPECT_EQ(JoinThrows<NoAnswer>(),
            "the scheduler (10.0.0.1:9000) did not answer within 0.1 s "
            "(BYTEPS_START_TIMEOUT_S=0.05): connection refused");
}

TEST_F(NodeMembershipTest, ASchedulerThatClosesBeforeItsWelcomeCannotBeJoined) {
  Make(Node::WORKER);
  answers_[Control::ADD_NODE] = [this] { membership_->OnDisconnect(kScheduler); };
  EXPECT_EQ(JoinThrows<Error>(),
            "the scheduler (10.0.0.1:9000) cannot be joined: it closed the connection, as it does "
            "when its job has ended");
  Make(Node::WORKER);
  answers_[Control::ADD_NODE] = [this] { membership_->OnLinkLost(kScheduler, "refused", false); };
  EXPECT_EQ(JoinThrows<Error>(), "the scheduler (10.0.0.1:9000) cannot be joined: refused");
}

TEST_F(NodeMembershipTest, AFailureWhileOthersAreMissingIsTheJobs) {
  Make(Node::WORKER);
  answers_[Control::ADD_NODE] = [this] {
    Welcome();
    Say(Control::JOB_FAILED, "worker 1 was lost");
  };
  EXPECT_EQ(JoinThrows<JobFailed>(), "worker 1 was lost");
  // Only members are told of failures, so a failure may arrive before the welcome.
  Make(Node::WORKER);
  answers_[Control::ADD_NODE] = [this] { Say(Control::JOB_FAILED, "worker 1 was lost"); };
  EXPECT_EQ(JoinThrows<JobFailed>(), "worker 1 was lost");
}

TEST_F(NodeMembershipTest, OnlyTheSchedulerIsHeard) {
  JoinAs(Node::WORKER);
  Say(Control::JOB_FAILED, "nonsense", {}, server_);
  Say(Control::JOB_END, membership::Pack(membership::End{}));  // only servers get it
  Say(Control::LEAVE, Finish());
  EXPECT_FALSE(Heard(MembershipEvent::kFailed));
  EXPECT_FALSE(Heard(MembershipEvent::kEnded));
}

TEST_F(NodeMembershipTest, AWorkerLeavesWhenTheSchedulerHasHeard) {
  const Farewell farewells[] = {{},
                                {true, "", ""},
                                {false, "", "push_pull of 'a' timed out"},
                                {true, "exit status 3", "an error"}};
  for (const Farewell& farewell : farewells) {
    answers_[Control::LEAVE] = [this] { Say(Control::NODE_LEFT, "", {links_->self()}); };
    JoinAs(Node::WORKER);
    membership_->Leave(farewell);
    EXPECT_EQ(links_->SentTo(kScheduler, Control::LEAVE).at(0).meta.body,
              membership::Pack(membership::Leave(farewell)));
    // After its LEAVE, this node ignores the scheduler.
    membership_->OnDisconnect(kScheduler);
    Say(Control::JOB_FAILED, "worker 1 was lost");
    EXPECT_FALSE(Heard(MembershipEvent::kFailed));
  }
}

TEST_F(NodeMembershipTest, AServerIsToldWhoLeftAndOfTheEnd) {
  JoinAs(Node::SERVER);
  Say(Control::NODE_LEFT, "", {OtherWorker()});
  const MembershipEvent left = Await(MembershipEvent::kNodeLeft);
  EXPECT_EQ(left.rank, 1);
  EXPECT_EQ(left.reason, "worker 1 (10.0.0.4) left the job");
  Say(Control::JOB_END, membership::Pack(membership::End{true}));
  EXPECT_TRUE(Await(MembershipEvent::kEnded).suspended);
}

TEST_F(NodeMembershipTest, ABrokenLinkIsReported) {
  JoinAs(Node::WORKER);
  membership_->OnLinkLost(server_, "its connection was reset", false);
  EXPECT_EQ(links_->Await(kScheduler, Control::JOB_FAILED, 1).at(0).meta.body,
            "server 0 (10.0.0.3:9001) was lost to worker 0 (10.0.0.2): its connection was reset");
  EXPECT_FALSE(Heard(MembershipEvent::kFailed)) << "that is for the scheduler to say";
}

TEST_F(NodeMembershipTest, TheLinkOfAWorkerThatLeftIsNot) {
  JoinAs(Node::SERVER);
  Say(Control::NODE_LEFT, "", {OtherWorker()});
  membership_->OnLinkLost(OtherWorker().id, "its connection closed", false);
  // The scheduler closes the connection later. That must not be taken for the cause.
  membership_->OnDisconnect(kScheduler);
  EXPECT_EQ(Await(MembershipEvent::kFailed).reason,
            "scheduler (10.0.0.1:9000) was lost: its connection closed");
  EXPECT_EQ(links_->CountTo(kScheduler, Control::JOB_FAILED), 0);
}

// If the membership still knew the broken link, the server would fail when the replica is back.
TEST_F(NodeMembershipTest, TheBrokenLinkOfARemovedReplicaIsForgotten) {
  JoinAs(Node::SERVER);
  membership_->OnLinkLost(OtherWorker().id, "its connection was reset", false);
  links_->Await(kScheduler, Control::JOB_FAILED, 1);
  ReplicaView view;
  view.workers = 2;
  view.epoch = 1;
  view.present = "10";
  view.waiting = "00";
  view.ready_epochs = {0, 0};
  view.donors = {-1, -1};
  Say(Control::MEMBERS, Word(view), {OtherWorker()});
  view.epoch = 2;
  view.present = "11";
  view.ready_epochs = {0, 2};
  Say(Control::MEMBERS, Word(view));
  // The removed worker's broken link must be forgotten.
  membership_->OnLinkLost(IdOf(Node::WORKER, 0), "its connection was reset", false);
  const auto reports = links_->Await(kScheduler, Control::JOB_FAILED, 2);
  EXPECT_EQ(reports.at(1).meta.body.find("worker 0"), 0u) << reports.at(1).meta.body;
}

TEST_F(NodeMembershipTest, TheBrokenLinkOfAServerThatIsReplacedIsForgotten) {
  JoinAs(Node::WORKER);
  membership_->OnLinkLost(server_, "its connection closed", false);
  Say(Control::MEMBERS,
      Word(membership::ServerLost{0, 1, "server 0 was lost: its connection closed"}));
  const MembershipEvent lost = Await(MembershipEvent::kServerLost);
  EXPECT_EQ(lost.rank, 0);
  EXPECT_EQ(lost.reason, "server 0 was lost: its connection closed");
  Node next = Server();
  next.port = 9002;
  const std::string word = Word(membership::ServerReplaced{0, 2, 1});
  Say(Control::MEMBERS, word);  // without the successor
  EXPECT_FALSE(Heard(MembershipEvent::kServerReplaced));
  Say(Control::MEMBERS, word, {next});
  EXPECT_EQ(Await(MembershipEvent::kServerReplaced).node.address, "10.0.0.3:9002");
  EXPECT_EQ(membership_->NameOf(server_), "server 0 (10.0.0.3:9002)");
  // The successor's links are watched again.
  membership_->OnLinkLost(server_, "its connection was reset", false);
  EXPECT_EQ(links_->Await(kScheduler, Control::JOB_FAILED, 1).at(0).meta.body,
            "server 0 (10.0.0.3:9002) was lost to worker 0 (10.0.0.2): its connection was reset");
}

class NeighborTest : public NodeMembershipTest {
 protected:
  // Joins as server 1 of a ring with these neighbors.
  void JoinAmong(const std::vector<Node>& neighbors) {
    settings_.backups = true;
    Make(Node::SERVER);
    answers_[Control::ADD_NODE] = [this, neighbors] {
      Node self = links_->self();
      self.id = Postoffice::ServerRankToID(1);
      Say(Control::WELCOME, membership::Pack(membership::Welcome{1, 1}), {self});
      Say(Control::ADD_NODE, membership::Pack(membership::Beginning{25'000, false, {{0, 2}}}),
          neighbors);
    };
    membership_->Join();
  }
  Node Server(int rank, uint64_t token) const {
    Node node = NodeMembershipTest::Server();
    node.id = Postoffice::ServerRankToID(rank);
    SetToken(token, &node);
    return node;
  }
  void Replace(const Node& node, int servers, int turn) {
    Say(Control::MEMBERS,
        Word(membership::ServerReplaced{Postoffice::IDtoRank(node.id), turn, servers}), {node});
  }
};

TEST_F(NeighborTest, AServerHasLinksWithItsNeighborsAlone) {
  JoinAmong({Server(0, 70), Server(2, 72)});
  EXPECT_EQ(links_->linked(), (std::vector<int>{Server(0, 0).id, Server(2, 0).id}));
  EXPECT_EQ(membership_->NameOf(Server(2, 0).id), "server 2 (10.0.0.3:9001)");
  Replace(Server(3, 73), 4, 2);
  EXPECT_EQ(Await(MembershipEvent::kServerReplaced).rank, 3);
  EXPECT_EQ(links_->linked().size(), 2u);
}

TEST_F(NeighborTest, TheLinkWithALostServerIsForgottenBeforeTheNextHasItsPlace) {
  JoinAmong({Server(0, 70)});
  membership_->OnLinkLost(Server(0, 0).id, "its connection closed", true);
  Say(Control::MEMBERS, Word(membership::ServerLost{0, 3, "server 0 was lost"}));
  EXPECT_EQ(Await(MembershipEvent::kServerLost).reason, "server 0 was lost");
  EXPECT_EQ(links_->unlinked(), std::vector<int>{Server(0, 0).id});
  Replace(Server(0, 80), 2, 4);
  EXPECT_EQ(Await(MembershipEvent::kServerReplaced).node.address, "10.0.0.3:9001");
  Say(Control::MEMBERS, Word(membership::ServerLost{0, 3, "server 0 was lost"}));
  EXPECT_EQ(links_->unlinked().size(), 1u);
  EXPECT_EQ(links_->linked().size(), 2u);
  EXPECT_EQ(links_->CountTo(kScheduler, Control::JOB_FAILED), 0);
}

TEST_F(NeighborTest, OneThatItWasToldOfIsNoNews) {
  JoinAmong({Server(0, 70)});
  Replace(Server(0, 70), 2, 2);
  EXPECT_FALSE(Heard(MembershipEvent::kServerReplaced));
  EXPECT_EQ(links_->linked().size(), 1u);
}

TEST_F(NeighborTest, WhoMissedThatAServerWasLostHearsItWithTheNextOne) {
  JoinAmong({Server(0, 70)});
  Replace(Server(0, 80), 2, 6);
  EXPECT_EQ(Await(MembershipEvent::kServerReplaced).rank, 0);
  EXPECT_TRUE(Heard(MembershipEvent::kServerLost));
  EXPECT_EQ(links_->unlinked().size(), 1u);
  EXPECT_EQ(links_->linked().size(), 2u);
}

TEST_F(NeighborTest, OfTwoBrokenLinksBothAreReported) {
  JoinAmong({Server(0, 70), Server(2, 72)});
  membership_->OnLinkLost(Server(0, 0).id, "its connection was reset", false);
  membership_->OnLinkLost(Server(2, 0).id, "its connection closed", false);
  std::set<int> reported;
  for (const Message& report : links_->Await(kScheduler, Control::JOB_FAILED, 2)) {
    reported.insert(report.meta.control.node.at(0).id);
  }
  EXPECT_EQ(reported, (std::set<int>{Server(0, 0).id, Server(2, 0).id}));
}

TEST_F(NeighborTest, ABrokenLinkWithAServerIsReportedAsThat) {
  JoinAmong({Server(0, 70)});
  membership_->OnLinkLost(Server(0, 0).id, "its connection was reset", false);
  const Message report = links_->Await(kScheduler, Control::JOB_FAILED, 1).at(0);
  EXPECT_EQ(report.meta.body.find("server 0 (10.0.0.3:9001) was lost to server 1 (10.0.0.2:9001)"),
            0u);
  EXPECT_EQ(report.meta.control.node.at(0).role, Node::SERVER);
  EXPECT_EQ(TokenOf(report.meta.control.node.at(0)), 70u);
}

TEST_F(NeighborTest, AServerThatLeavesInOrderIsNoLoss) {
  JoinAmong({Server(0, 70)});
  membership_->OnDisconnect(Server(0, 0).id);
  Say(Control::JOB_END, membership::Pack(membership::End{}));
  membership_->OnLinkLost(Server(0, 0).id, "its connection closed", true);
  EXPECT_FALSE(Heard(MembershipEvent::kFailed));
  EXPECT_EQ(links_->CountTo(kScheduler, Control::JOB_FAILED), 0);
}

TEST_F(NodeMembershipTest, ServersHearOfOthersWithoutCopiesToo) {
  JoinAs(Node::SERVER);
  Say(Control::MEMBERS, Word(membership::ServerLost{1, 1, "it was lost"}));
  EXPECT_EQ(Await(MembershipEvent::kServerLost).rank, 1);
}

TEST_F(NodeMembershipTest, TheLastWordOfTheSchedulerGoesFirst) {
  JoinAs(Node::WORKER);
  membership_->OnDisconnect(kScheduler);
  Say(Control::JOB_FAILED, "server 0 was lost");
  EXPECT_EQ(Await(MembershipEvent::kFailed).reason, "server 0 was lost");
}

TEST_F(NodeMembershipTest, ASchedulerThatIsSilentIsLost) {
  settings_.peer_timeout_s = 0.3;
  JoinAs(Node::WORKER);
  EXPECT_NE(Await(MembershipEvent::kFailed)
                .reason.find("scheduler (10.0.0.1:9000) was lost: no heartbeat for 0.3 s "
                             "(BYTEPS_PEER_TIMEOUT_S=0.3)"),
            std::string::npos);
}

TEST_F(NodeMembershipTest, HeartbeatsCarryTheReport) {
  settings_.peer_timeout_s = 0.3;
  answers_[Control::HEARTBEAT] = [this] { Say(Control::HEARTBEAT, ""); };
  JoinAs(Node::SERVER);
  membership_->SetReporter([] { return std::string("a report"); });
  const size_t before = links_->SentTo(kScheduler, Control::HEARTBEAT).size();
  // A heartbeat without the report may already be in flight.
  const auto beats = links_->Await(kScheduler, Control::HEARTBEAT, before + 2);
  EXPECT_EQ(beats.back().meta.body, "a report");
}

TEST_F(NodeMembershipTest, AServerThatIsStoppedSaysHow) {
  answers_[Control::LEAVE] = [this] { Say(Control::JOB_FAILED, "server 0 was stopped"); };
  JoinAs(Node::SERVER);
  membership_->StopByOrder("stopped by SIGTERM");
  EXPECT_EQ(links_->SentTo(kScheduler, Control::LEAVE).at(0).meta.body,
            Stopped("stopped by SIGTERM"));
  EXPECT_EQ(Await(MembershipEvent::kFailed).reason, "server 0 was stopped");
}

}  // namespace
}  // namespace ps
