// Servers that have links with each other: what the scheduler tells them, and whose loss it is
// where such a link breaks.
#include <string>
#include <vector>

#include "tests/net/membership/scheduler_test.h"

namespace ps {
namespace {

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

TEST_F(NeighborsTest, WithoutTheSettingServersHearNothingOfServers) {
  GatherServers(2, false);
  EXPECT_EQ(Told(0), Ranks());
  membership_->OnDisconnect(Id(1));
  Come();
  EXPECT_EQ(Told(1), Ranks());
  EXPECT_EQ(CountWords(0), 0);
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
