// What both sides of membership are made of: texts in messages, the nodes of a job, the thread that
// sends heartbeats; and what nodes tell a scheduler that returns.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/net/membership/account.h"
#include "byteps/net/membership/event.h"
#include "byteps/net/membership/heartbeat_thread.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/membership_settings.h"
#include "byteps/net/membership/node_membership.h"
#include "byteps/net/membership/refusal.h"
#include "byteps/net/membership/replica_view.h"
#include "byteps/net/membership/roster.h"
#include "byteps/net/membership/roster_policy.h"
#include "ps/internal/postoffice.h"
#include "tests/net/membership/membership_test.h"

namespace ps {
namespace {

using membership::Claim;
using membership::PackFarewell;
using membership::Refusal;

Node NodeOf(Node::Role role, int rank) {
  Node node;
  node.role = role;
  node.aux_id = role == Node::WORKER ? rank : -1;
  node.id = IdOf(role, rank);
  node.hostname = "10.0.0.2";
  node.port = 0;
  return node;
}

TEST(MembershipProtocol, ABeginningIsReadAsItWasMade) {
  for (const int mbps : {0, 1, 25'000, 999'999'999}) {
    for (const bool late : {false, true}) {
      for (const membership::Turns& turns : {membership::Turns(), {{0, 2}, {17, 3}}}) {
        const auto read =
            membership::ParseBeginning(membership::PackBeginning({mbps, late, turns}));
        EXPECT_EQ(read.link_mbps, mbps);
        EXPECT_EQ(read.late, late);
        EXPECT_EQ(read.turns, turns);
      }
    }
  }
  for (const char* other :
       {"", "link=", "link=-5 late=1 turns=", "link=5 late=1", "finish", "link=5 late=1 turns=3",
        "link=5 late=1 turns=3:0,", "link=5 late=1 turns=3:1,3:2,", "link=5 late=1 turns=-3:1,"}) {
    const auto read = membership::ParseBeginning(other);
    EXPECT_EQ(read.link_mbps, 0) << other;
    EXPECT_FALSE(read.late) << other;
    EXPECT_TRUE(read.turns.empty()) << other;
  }
}

TEST(MembershipProtocol, AClaimIsReadAsItWasMade) {
  Claim claim;
  claim.protocol = membership::kProtocol;
  claim.workers = 7;
  claim.link_mbps = 25'000;
  claim.probe = 2;
  Claim read;
  EXPECT_TRUE(ParseClaim(PackClaim(claim), &read));
  EXPECT_EQ(PackClaim(read), PackClaim(claim));
  for (const char* other :
       {"", "protocol=5 workers=2",
        "protocol=5 workers=9999999 servers=1 link=0 probe=0 replicas=1 backups=0",
        "protocol=5 workers=1 servers=1 link=0 probe=0 replicas=1",
        "protocol=5 workers=1 servers=1 link=-1 probe=0 replicas=1 backups=0"}) {
    EXPECT_FALSE(ParseClaim(other, &read)) << other;
  }
}

TEST(MembershipProtocol, AFarewellIsAFailureOrNot) {
  const auto failure = [](const Farewell& farewell, bool errors_count) {
    return membership::ParseFarewell(PackFarewell(farewell), errors_count).failure;
  };
  EXPECT_EQ(failure({false, "exit status 3", ""}, false), "failed: exit status 3");
  EXPECT_EQ(failure({true, "", "it timed out"}, false), "");
  EXPECT_EQ(failure({true, "", "it timed out"}, true), "failed: it timed out");
  EXPECT_EQ(membership::ParseFarewell("stopped by SIGTERM", false).failure,
            "was stopped by SIGTERM");
  EXPECT_TRUE(membership::ParseFarewell(PackFarewell({true, "", "an error"}), false).suspend);
  EXPECT_FALSE(membership::ParseFarewell(PackFarewell({}), true).suspend);
}

TEST(MembershipRoster, ItNamesThoseThatAreMissing) {
  Roster roster(JobSize{20, 2});
  EXPECT_FALSE(roster.IsComplete());
  roster.Put(NodeOf(Node::WORKER, 1));
  roster.Put(NodeOf(Node::SERVER, 0));
  EXPECT_EQ(
      roster.Missing(),
      "worker 0, worker 2, worker 3, worker 4, worker 5, worker 6, worker 7, worker 8, "
      "worker 9, worker 10, worker 11, worker 12, worker 13, worker 14, worker 15, worker 16, "
      "3 more workers, 1 server");
  EXPECT_EQ(roster.FirstFreeRank(Node::WORKER), 0);
  EXPECT_EQ(roster.FirstFreeRank(Node::SERVER), 1);
  roster.Expect({1, 1});
  EXPECT_TRUE(roster.IsComplete());
  roster.Expect({1, -1});
  EXPECT_FALSE(roster.IsComplete()) << "nobody knows yet how many";
}

TEST(MembershipRoster, AJobEndsWithItsLastWorker) {
  Roster roster(JobSize{2, 1});
  roster.Put(NodeOf(Node::SERVER, 0));
  roster.Put(NodeOf(Node::WORKER, 0))->left = true;
  EXPECT_FALSE(roster.AllWorkersLeft()) << "one has not come";
  Member* const last = roster.Put(NodeOf(Node::WORKER, 1));
  EXPECT_FALSE(roster.AllWorkersLeft());
  EXPECT_EQ(roster.PresentIds(), (std::vector<int>{IdOf(Node::SERVER, 0), IdOf(Node::WORKER, 1)}));
  last->left = last->left_to_suspend = true;
  EXPECT_TRUE(roster.AllWorkersLeft());
  EXPECT_TRUE(roster.IsBeingSuspended());
}

TEST(MembershipProtocol, ReplicasAreToldAsTheyAre) {
  ReplicaView view;
  view.workers = 6;
  view.epoch = 12;
  view.present = "101";
  view.waiting = "010";
  view.lives = {0, 11, 7};
  view.donors = {-1, -1, 0};
  for (const std::string news : {"", "replica 1 was removed: worker 3 was lost"}) {
    view.news = news;
    ReplicaView told;
    ASSERT_TRUE(membership::ParseReplicas(membership::PackReplicas(view), &told));
    EXPECT_EQ(membership::PackReplicas(told), membership::PackReplicas(view));
    EXPECT_EQ(told.AbsentRanks(), (std::set<int>{2, 3}));
    EXPECT_EQ(told.donors, view.donors);
  }
  for (const char* other :
       {"", "workers=6", "workers=6 epoch=1 present=1 waiting=0 lives=0 donors=- ",
        "workers=5 epoch=1 present=11 waiting=00 lives=0,0 donors=-,- ",
        "workers=6 epoch=1 present=12 waiting=00 lives=0,0 donors=-,- ",
        "workers=6 epoch=1 present=11 waiting=000 lives=0,0 donors=-,- ",
        "workers=6 epoch=1 present=11 waiting=00 lives=0 donors=- ",
        "workers=6 epoch=1 present=11 waiting=00 lives=0,x donors=-,- ",
        "workers=6 epoch=1 present=11 waiting=00 lives=0,0 donors=-,2 ",
        "workers=6 epoch=1 present=11 waiting=00 lives=0,0 ",
        "workers=6 epoch=-1 present=11 waiting=00 lives=0,0 donors=-,- "}) {
    ReplicaView told;
    EXPECT_FALSE(membership::ParseReplicas(other, &told)) << other;
  }
}

TEST(MembershipProtocol, WordsOfReplicasAreToldAsTheyAre) {
  using membership::MemberWord;
  for (const auto kind : {MemberWord::kAcknowledged, MemberWord::kReady, MemberWord::kAdmit,
                          MemberWord::kAwaited, MemberWord::kLate}) {
    for (const char* text : {"", "outer/0/fragment1", "it had not pushed 'a b' for 2.0 s"}) {
      MemberWord word;
      ASSERT_TRUE(membership::ParseWord(membership::PackWord({kind, 2, 17, text}), &word));
      EXPECT_EQ(word.kind, kind);
      EXPECT_EQ(word.number, 2);
      EXPECT_EQ(word.epoch, 17);
      EXPECT_EQ(word.text, text);
    }
  }
  for (const char* other : {"", "ready", "ready number=1", "go number=1 epoch=1 ",
                            "ready number=-1 epoch=1 ", "ready number=1 epoch=1"}) {
    MemberWord word;
    EXPECT_FALSE(membership::ParseWord(other, &word)) << other;
  }
}

TEST(MembershipAdmission, WhatMayBeTrueOfTheLastIncarnationMayComeAgain) {
  RosterPolicy policy(nullptr, nullptr);
  Roster roster(JobSize{2, 1});
  roster.Put(NodeOf(Node::WORKER, 0));
  Claim claim;
  claim.protocol = membership::kProtocol;
  for (const bool keep : {false, true}) {
    MembershipSettings settings;
    settings.keep = keep;
    Node node = NodeOf(Node::WORKER, 0);
    Refusal refusal = Assign(roster, &policy, settings, claim, &node);
    EXPECT_EQ(refusal.reason,
              "the job has a worker 0 (10.0.0.2) already; does another job use this scheduler?");
    EXPECT_EQ(refusal.later, keep);
    claim.servers = 3;
    refusal = Assign(roster, &policy, settings, claim, &node);
    EXPECT_EQ(refusal.reason,
              "it was started for 3 servers, the scheduler for 1 server (DMLC_NUM_SERVER)");
    EXPECT_FALSE(refusal.later) << "a scheduler's servers stay as many";
    claim.servers = -1;
  }
  Node any = NodeOf(Node::WORKER, -1);
  EXPECT_FALSE(Assign(roster, &policy, MembershipSettings(), claim, &any));
  EXPECT_EQ(any.aux_id, 1);
  EXPECT_EQ(any.id, IdOf(Node::WORKER, 1));
  EXPECT_EQ(roster.members().size(), 1u) << "it is only asked";
}

TEST(MembershipAdmission, SeveralAreAskedForAtOnce) {
  RosterPolicy policy(nullptr, nullptr);
  Roster roster(JobSize{4, 2});
  roster.Put(NodeOf(Node::WORKER, 2));
  Claim claim;
  claim.protocol = membership::kProtocol;
  claim.probe = 2;
  EXPECT_FALSE(AssignAll(roster, &policy, MembershipSettings(), claim, NodeOf(Node::SERVER, 0)));
  EXPECT_FALSE(AssignAll(roster, &policy, MembershipSettings(), claim, NodeOf(Node::WORKER, 0)));
  EXPECT_EQ(AssignAll(roster, &policy, MembershipSettings(), claim, NodeOf(Node::WORKER, 1)).reason,
            "the job has a worker 2 (10.0.0.2) already; does another job use this scheduler?");
  claim.probe = 3;
  EXPECT_EQ(AssignAll(roster, &policy, MembershipSettings(), claim, NodeOf(Node::SERVER, 0)).reason,
            "the job has room for 2 more servers, and this machine has 3");
}

class Beats : public testing::Test {
 protected:
  using Clock = AwakeClock;

  ~Beats() override { thread_.Stop(); }

  void Watch(std::optional<Clock::time_point> due) {
    {
      MutexLock lock(&mu_);
      due_ = due;
    }
    thread_.Wake();
  }
  void AwaitBeats(int count) {
    MutexLock lock(&mu_);
    cond_.Wait(&mu_, [&]() PS_REQUIRES(mu_) { return beats_ >= count; });
  }
  void AwaitDues(int count) {
    MutexLock lock(&mu_);
    cond_.Wait(&mu_, [&]() PS_REQUIRES(mu_) { return dues_ >= count; });
  }
  int beats() {
    MutexLock lock(&mu_);
    return beats_;
  }

  static constexpr double kHeartbeatS = 0.01;
  Mutex mu_;
  CondVar cond_;
  std::optional<Clock::time_point> due_ PS_GUARDED_BY(mu_);
  int beats_ PS_GUARDED_BY(mu_) = 0;
  int dues_ PS_GUARDED_BY(mu_) = 0;
  HeartbeatThread thread_{kHeartbeatS,
                          {[this] {
                             MutexLock lock(&mu_);
                             return due_;
                           },
                           [this](Clock::time_point) {
                             MutexLock lock(&mu_);
                             ++dues_;
                             due_ = Clock::time_point::max();
                             cond_.NotifyAll();
                           },
                           [this](Clock::time_point) {
                             MutexLock lock(&mu_);
                             ++beats_;
                             cond_.NotifyAll();
                           }}};
};

TEST_F(Beats, ComeOnlyWhileTheJobIsWatched) {
  thread_.Start();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(beats(), 0);
  Watch(Clock::time_point::max());
  AwaitBeats(3);
}

TEST_F(Beats, WhatIsDueIsDoneOnce) {
  thread_.Start();
  Watch(Clock::now());
  AwaitDues(1);
  AwaitBeats(beats() + 3);
  Watch(Clock::now() + std::chrono::milliseconds(5));
  AwaitDues(2);
  MutexLock lock(&mu_);
  EXPECT_EQ(dues_, 2);
}

TEST_F(Beats, StopNeedsNoStart) { thread_.Stop(); }

// ----- what nodes tell a scheduler that returns, and nodes whose scheduler has died

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
  account.replicas = {4, 7, "10", "01", {0, 5}, {-1, -1}, ""};
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
    membership_.reset();  // whose thread uses the links
    role_ = role;
    joined_ = false;
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
  Say(Control::MEMBERS, "workers=4 epoch=5 present=10 waiting=00 lives=0,0 donors=-,- ");
  const Account account = LoseScheduler();
  EXPECT_EQ(account.job, links_->job());
  EXPECT_EQ(account.life, 1);
  EXPECT_EQ(account.left, std::set<int>{3});
  EXPECT_EQ(account.replicas.epoch, 5);
}

TEST_F(NodeReturnTest, WhatWasAskedIsAskedAgain) {
  JoinAs(Node::WORKER);
  Say(Control::MEMBERS, "workers=2 epoch=5 present=10 waiting=01 lives=0,5 donors=-,- ");
  membership_->SayOfReplica({MemberWord::kAdmit, 1, 5});
  LoseScheduler();
  const int before = links_->CountTo(kScheduler, Control::MEMBERS);
  membership_->SayOfReplica({MemberWord::kAdmit, 1, 5});  // to nobody
  EXPECT_EQ(links_->CountTo(kScheduler, Control::MEMBERS), before);
  Welcome(2);
  EXPECT_EQ(links_->CountTo(kScheduler, Control::MEMBERS), before + 1);
  Say(Control::MEMBERS, "workers=2 epoch=7 present=11 waiting=00 lives=0,5 donors=-,- ");
  LoseScheduler(3);
  Welcome(3);  // it has been answered
  EXPECT_EQ(links_->CountTo(kScheduler, Control::MEMBERS), before + 1);
}

TEST_F(NodeReturnTest, AFarewellIsSaidAgain) {
  for (const char* failure : {"", "exit status 3"}) {
    JoinAs(Node::WORKER);
    std::thread leaver([&] { membership_->Leave({false, failure, ""}); });
    links_->Await(kScheduler, Control::LEAVE, 1);
    LoseScheduler();
    Welcome(2);
    const auto said = links_->Await(kScheduler, Control::LEAVE, 2);
    EXPECT_EQ(said[1].meta.body, said[0].meta.body);
    Say(Control::NODE_LEFT, "", {links_->self()});
    leaver.join();
  }
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
