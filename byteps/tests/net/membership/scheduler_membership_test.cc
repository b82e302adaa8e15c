// The scheduler's side of membership, without a network or nodes: the test says what nodes say, and
// looks at what is answered.
#include "byteps/net/membership/scheduler_membership.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>

#include "byteps/base/mutex.h"
#include "ps/internal/postoffice.h"
#include "tests/net/membership/recorded_links.h"

namespace ps {
namespace {

using membership::MemberWord;

class SchedulerMembershipTest : public testing::Test {
 protected:
  void Start(MembershipSettings settings) {
    Listen(settings);
    membership_->Join();
  }

  // As it is before it joins.
  void Listen(MembershipSettings settings) {
    settings.peer_timeout_s = settings.start_timeout_s = 600;
    membership_ = std::make_unique<SchedulerMembership>(
        &links_, settings, [this](const MembershipEvent& e) { OnEvent(e); });
  }

  int replicas_ = 1;

  // A job of two workers and a server, at work, which goes on without the server for so long.
  void GatherReplacing(double seconds = 600) {
    MembershipSettings settings;
    settings.workers = 2;
    settings.servers = 1;
    settings.replace_servers_s = seconds;
    Start(settings);
    GatherNodes();
  }
  void GatherReplacingReplicas() {
    replicas_ = 2;
    MembershipSettings settings;
    settings.workers = 2;
    settings.servers = 1;
    settings.replace_servers_s = 600;
    Start(settings);
    GatherNodes();
  }
  // A worker says that its link with the server at this port broke.
  void Accuse(int worker, int port) {
    Message message;
    message.meta.control.cmd = Control::JOB_FAILED;
    message.meta.sender = worker;
    message.meta.body = "server 0 was lost to worker 0";
    Node node;
    node.id = server_;
    node.role = Node::SERVER;
    node.hostname = "10.0.0.2";
    node.port = port;
    message.meta.control.node = {node};
    membership_->Handle(message);
  }
  MemberWord LastWord(int id) {
    MemberWord word;
    const auto told = links_.SentTo(id, Control::MEMBERS);
    EXPECT_FALSE(told.empty());
    if (!told.empty()) {
      EXPECT_TRUE(membership::ParseWord(told.back().meta.body, &word));
    }
    return word;
  }

  void StartKept(int servers) {
    MembershipSettings settings;
    settings.keep = true;
    settings.servers = servers;
    Start(settings);
  }

  void Register(Node::Role role, int rank, int workers, int servers) {
    Message message;
    message.meta.control.cmd = Control::ADD_NODE;
    message.meta.body = "protocol=" + std::to_string(membership::kProtocol) +
                        " workers=" + std::to_string(workers) +
                        " servers=" + std::to_string(servers) +
                        " link=0 probe=0 replicas=" + std::to_string(replicas_);
    Node node;
    node.role = role;
    node.aux_id = role == Node::WORKER ? rank : -1;
    node.hostname = "10.0.0.2";
    node.port = role == Node::WORKER ? 0 : 9001;
    node.nics = {{"10.0.0.2", 24, 25'000}, {"10.1.0.2", 24, 25'000}};
    message.meta.control.node.push_back(node);
    membership_->Handle(message);
  }

  void Say(int sender, Control::Command command, const std::string& body) {
    Message message;
    message.meta.sender = sender;
    message.meta.control.cmd = command;
    message.meta.body = body;
    membership_->Handle(message);
  }

  // A job of two workers and a server, at work.
  void Gather() {
    MembershipSettings settings;
    settings.workers = 2;
    settings.servers = 1;
    Start(settings);
    GatherNodes();
  }
  void GatherNodes() {
    Register(Node::SERVER, -1, -1, 1);
    Register(Node::WORKER, 0, 2, 1);
    Register(Node::WORKER, 1, 2, 1);
    ASSERT_EQ(membership_->View().phase, JobView::kRunning);
  }

  // A job of two replicas of two workers, and a server, at work.
  void GatherReplicas() {
    replicas_ = 2;
    MembershipSettings settings;
    settings.workers = 4;
    settings.servers = 1;
    Start(settings);
    Register(Node::SERVER, -1, -1, 1);
    for (int rank = 0; rank < 4; ++rank) Register(Node::WORKER, rank, 4, 1);
    ASSERT_EQ(membership_->View().phase, JobView::kRunning);
    EXPECT_EQ(membership_->View().replicas.present, "11");
  }
  ReplicaView LastTold(int id) {
    const auto told = links_.SentTo(id, Control::MEMBERS);
    ReplicaView view;
    EXPECT_FALSE(told.empty());
    if (told.empty()) return view;
    EXPECT_TRUE(membership::ParseReplicas(told.back().meta.body, &view));
    return view;
  }
  void Acknowledge() {
    Say(server_, Control::MEMBERS,
        membership::PackWord({membership::MemberWord::kAcknowledged, 0, LastTold(server_).epoch}));
  }

  void OnEvent(const MembershipEvent& event) {
    MutexLock lock(&mu_);
    if (event.kind == MembershipEvent::kFailed) failure_ = event.reason;
    if (event.kind == MembershipEvent::kEnded) ended_ = true;
  }
  std::string failure() {
    MutexLock lock(&mu_);
    return failure_;
  }
  bool ended() {
    MutexLock lock(&mu_);
    return ended_;
  }

  const int server_ = Postoffice::ServerRankToID(0);
  const int worker_ = Postoffice::WorkerRankToID(0);
  const int other_ = Postoffice::WorkerRankToID(1);
  RecordedLinks links_{Node::SCHEDULER};
  std::unique_ptr<SchedulerMembership> membership_;
  Mutex mu_;
  std::string failure_ PS_GUARDED_BY(mu_);
  bool ended_ PS_GUARDED_BY(mu_) = false;
};

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
  bool late = false;
  membership::ParseLink(added.back().meta.body, &late);
  EXPECT_TRUE(late);
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

// ------------------------------------------------------------------ servers that are replaced

TEST_F(SchedulerMembershipTest, AnotherServerTakesThePlaceOfALostOne) {
  GatherReplacing();
  Register(Node::SERVER, -1, -1, 1);
  EXPECT_EQ(links_.LastRefusal().find(membership::kAgain), 0u) << "it may wait for a place";
  membership_->OnDisconnect(server_);
  EXPECT_EQ(failure(), "");
  for (const int id : {worker_, other_}) {
    const MemberWord word = LastWord(id);
    EXPECT_EQ(word.kind, MemberWord::kServerLost);
    EXPECT_EQ(word.number, 0);
    EXPECT_EQ(word.text, "server 0 (10.0.0.2:9001) was lost: its connection closed");
  }
  EXPECT_EQ(links_.CountTo(server_, Control::JOB_FAILED), 1) << "should it be there after all";
  Register(Node::SERVER, -1, -1, 1);
  EXPECT_EQ(links_.CountTo(server_, Control::ADD_NODE), 2) << "it joins at once";
  for (const int id : {worker_, other_}) {
    EXPECT_EQ(LastWord(id).kind, MemberWord::kServerReplaced);
    EXPECT_EQ(links_.SentTo(id, Control::MEMBERS).back().meta.control.node.at(0).port, 9001);
  }
  EXPECT_EQ(membership_->View().phase, JobView::kRunning);
  EXPECT_EQ(failure(), "");
}

TEST_F(SchedulerMembershipTest, WithoutTheSettingItsLossEndsTheJob) {
  Gather();
  membership_->OnDisconnect(server_);
  EXPECT_NE(failure().find("server 0 (10.0.0.2:9001) was lost"), std::string::npos) << failure();
}

TEST_F(SchedulerMembershipTest, WhoHasLeftStaysForOthersWhileAServerMayBeLost) {
  GatherReplacing();
  Say(worker_, Control::LEAVE, "finish");
  EXPECT_EQ(links_.CountTo(worker_, Control::NODE_LEFT), 0) << "its sums may be wanted";
  membership_->OnDisconnect(server_);
  EXPECT_EQ(LastWord(worker_).kind, MemberWord::kServerLost);
  Register(Node::SERVER, -1, -1, 1);
  EXPECT_EQ(LastWord(worker_).kind, MemberWord::kServerReplaced);
  EXPECT_EQ(links_.CountTo(server_, Control::NODE_LEFT), 0) << "it may give what others lack";
  Say(other_, Control::LEAVE, "finish");
  EXPECT_EQ(links_.CountTo(worker_, Control::NODE_LEFT), 1);
  EXPECT_EQ(links_.CountTo(other_, Control::NODE_LEFT), 1);
  EXPECT_TRUE(ended());
}

TEST_F(SchedulerMembershipTest, AServerIsReplacedWhoseLinkWithAWorkerBroke) {
  GatherReplacing();
  // Of one that has lost its place it is no news.
  membership_->OnDisconnect(server_);
  Register(Node::SERVER, -1, -1, 1);
  Accuse(worker_, 9002);
  EXPECT_EQ(LastWord(worker_).kind, MemberWord::kServerReplaced);
  Accuse(worker_, 9001);
  EXPECT_EQ(failure(), "") << "without the worker there is no job";
  EXPECT_EQ(LastWord(other_).kind, MemberWord::kServerLost);
}

TEST_F(SchedulerMembershipTest, AServerThatIsHeardIsNotTheOneThatIsGone) {
  GatherReplacingReplicas();
  Accuse(worker_, 9001);
  EXPECT_EQ(links_.CountTo(other_, Control::MEMBERS), 0) << "nobody is lost yet";
  Say(server_, Control::HEARTBEAT, "");
  EXPECT_EQ(LastTold(server_).present, "01");
  EXPECT_EQ(failure(), "");
}

TEST_F(SchedulerMembershipTest, AServerThatIsNotHeardIs) {
  GatherReplacingReplicas();
  Accuse(worker_, 9001);
  const auto words = links_.Await(other_, Control::MEMBERS, 1);  // for some seconds
  MemberWord word;
  ASSERT_TRUE(membership::ParseWord(words[0].meta.body, &word));
  EXPECT_EQ(word.kind, MemberWord::kServerLost);
  EXPECT_EQ(membership_->View().replicas.present, "11");
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
