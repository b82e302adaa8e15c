// Replicas that are removed and come back.
#include <set>
#include <string>

#include "tests/recovery/scheduler/recovery_test.h"

namespace ps {
namespace {

using ReplicasTest = RecoveryTest;

TEST_F(ReplicasTest, AReplicaIsRemovedAndComesBack) {
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
  Say(IdOf(Node::WORKER, 2), Control::MEMBERS, Word(membership::Ready()));
  EXPECT_EQ(links_.CountTo(IdOf(Node::WORKER, 2), Control::ADD_NODE), 1) << "one is missing";
  Register(Node::WORKER, 3, 4, 1);
  const auto added = links_.SentTo(IdOf(Node::WORKER, 3), Control::ADD_NODE);
  ASSERT_EQ(added.size(), 2u);
  EXPECT_TRUE(membership::Parse<membership::Beginning>(added.back().meta.body)->late);
  Say(IdOf(Node::WORKER, 3), Control::MEMBERS, Word(membership::Ready()));
  view = LastTold(worker_);
  EXPECT_EQ(view.waiting, "01");
  EXPECT_EQ(view.present, "10");
  const int life = view.ready_epochs[1];
  EXPECT_EQ(life, view.epoch);

  Say(worker_, Control::MEMBERS, Word(membership::Admit{1, life - 1}));
  EXPECT_EQ(LastTold(server_).present, "10") << "that life of it does not wait";
  Say(worker_, Control::MEMBERS, Word(membership::Admit{1, life}));
  EXPECT_EQ(LastTold(server_).present, "11");
  EXPECT_EQ(LastTold(worker_).present, "10") << "the server has not acknowledged it";
  Acknowledge();
  EXPECT_EQ(LastTold(worker_).present, "11");
  EXPECT_EQ(LastTold(IdOf(Node::WORKER, 3)).present, "11");
  EXPECT_EQ(membership_->View().replicas.present, "11");
  for (int rank = 0; rank < 4; ++rank) Say(IdOf(Node::WORKER, rank), Control::LEAVE, Finish());
  EXPECT_TRUE(ended());
}

TEST_F(ReplicasTest, OneThatIsLateIsRemoved) {
  GatherReplicas();
  const int late = IdOf(Node::WORKER, 2);
  Say(server_, Control::MEMBERS, Word(membership::Awaited{2, 7, "outer"}));
  const auto told = links_.SentTo(late, Control::MEMBERS);
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(WordIn<membership::Awaited>(told[0]).tensor, "outer");
  EXPECT_EQ(WordIn<membership::Awaited>(told[0]).round, 7);
  EXPECT_EQ(links_.CountTo(worker_, Control::MEMBERS), 0);

  for (const int rank : {-1, 4, 1 << 20}) {
    Say(server_, Control::MEMBERS, Word(membership::Late{rank, 0, "why"}));
  }
  // Only servers may report late workers.
  Say(worker_, Control::MEMBERS, Word(membership::Late{2, 0, "why"}));
  EXPECT_EQ(links_.CountTo(worker_, Control::MEMBERS), 0);
  Say(server_, Control::MEMBERS, Word(membership::Late{2, 0, "it was late"}));
  EXPECT_EQ(LastTold(worker_).present, "10");
  EXPECT_EQ(LastTold(worker_).news, "replica 1 was removed: it was late");
  EXPECT_EQ(links_.CountTo(late, Control::JOB_FAILED), 1);
  // The last replica is never removed.
  Say(server_, Control::MEMBERS, Word(membership::Late{0, 1, "it was late"}));
  EXPECT_EQ(LastTold(server_).present, "10");
  EXPECT_EQ(failure(), "");
}

TEST_F(ReplicasTest, TheLastReplicaFailsTheJob) {
  GatherReplicas();
  Say(IdOf(Node::WORKER, 0), Control::LEAVE, Failed("exit status 3"));
  EXPECT_EQ(failure(), "");
  EXPECT_EQ(LastTold(server_).present, "01");
  membership_->OnDisconnect(IdOf(Node::WORKER, 2));
  EXPECT_NE(failure().find("worker 2 (10.0.0.2) was lost"), std::string::npos) << failure();
}

TEST_F(ReplicasTest, AServerTellsWhichWorkerItLost) {
  GatherReplicas();
  AccuseWorker(IdOf(Node::WORKER, 1));
  EXPECT_EQ(failure(), "");
  EXPECT_EQ(LastTold(server_).present, "01");
}

TEST_F(ReplicasTest, AJobEndsWithoutThoseWhoWaitToJoin) {
  GatherReplicas();
  membership_->OnDisconnect(IdOf(Node::WORKER, 3));
  Acknowledge();
  for (const int rank : {2, 3}) Register(Node::WORKER, rank, 4, 1);
  for (const int rank : {0, 1}) Say(IdOf(Node::WORKER, rank), Control::LEAVE, Finish());
  EXPECT_TRUE(ended());
  const auto told = links_.SentTo(IdOf(Node::WORKER, 3), Control::JOB_FAILED);
  ASSERT_FALSE(told.empty());
  EXPECT_EQ(told.back().meta.body, "the job ended before this replica had joined it");
}

}  // namespace
}  // namespace ps
