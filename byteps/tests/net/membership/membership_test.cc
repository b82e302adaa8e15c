// The scheduler's membership, without a network: nodes say anything, and what it answers is kept.
#include "byteps/net/membership/membership.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

#include "byteps/base/mutex.h"
#include "dmlc/logging.h"
#include "ps/base.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace {

class RecordedLinks : public MembershipLinks {
 public:
  RecordedLinks() {
    scheduler_.role = Node::SCHEDULER;
    scheduler_.id = kScheduler;
    scheduler_.hostname = "10.0.0.1";
    scheduler_.port = 9000;
  }
  Node self() const override { return scheduler_; }
  const Node& scheduler() const override { return scheduler_; }
  void SetSelf(const Node&) override {}
  void Connect(const Node& node) override {
    if (on_connect) on_connect(node);
    MutexLock lock(&mu_);
    linked_.push_back(node.id);
  }
  void Disconnect(int) override {}
  void SetIncarnation(int) override {}
  void Send(Message* message) override {
    MutexLock lock(&mu_);
    sent_.push_back(*message);
  }

  // Of those sent to `id`, or to refused nodes: by command.
  int CountTo(int id, Control::Command command) {
    MutexLock lock(&mu_);
    int count = 0;
    for (const Message& message : sent_) {
      count += message.meta.recver == id && message.meta.control.cmd == command;
    }
    return count;
  }
  std::string LastRefusal() {
    MutexLock lock(&mu_);
    std::string text;
    for (const Message& message : sent_) {
      if (message.meta.control.cmd == Control::REFUSED) text = message.meta.body;
    }
    return text;
  }

  std::function<void(const Node&)> on_connect;

 private:
  Node scheduler_;
  Mutex mu_;
  std::vector<Message> sent_ PS_GUARDED_BY(mu_);
  std::vector<int> linked_ PS_GUARDED_BY(mu_);
};

class SchedulerMembership : public testing::Test {
 protected:
  void Start(MembershipSettings settings) {
    Listen(settings);
    membership_->Join();
  }

  // As it is before it joins.
  void Listen(MembershipSettings settings) {
    settings.is_scheduler = true;
    settings.peer_timeout_s = settings.start_timeout_s = 600;
    membership_ = std::make_unique<Membership>(&links_, settings,
                                               [this](const MembershipEvent& e) { OnEvent(e); });
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
    message.meta.body = "protocol=" + std::to_string(kProtocol) +
                        " workers=" + std::to_string(workers) +
                        " servers=" + std::to_string(servers) + " link=0 probe=0";
    Node node;
    node.role = role;
    node.aux_id = role == Node::WORKER ? rank : -1;
    node.hostname = "10.0.0.2";
    node.port = role == Node::WORKER ? 0 : 9001;
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

  static constexpr int kProtocol = 6;
  const int server_ = Postoffice::ServerRankToID(0);
  const int worker_ = Postoffice::WorkerRankToID(0);
  const int other_ = Postoffice::WorkerRankToID(1);
  RecordedLinks links_;
  std::unique_ptr<Membership> membership_;
  Mutex mu_;
  std::string failure_ PS_GUARDED_BY(mu_);
  bool ended_ PS_GUARDED_BY(mu_) = false;
};

TEST_F(SchedulerMembership, WhoIsRefusedChangesNothing) {
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

TEST_F(SchedulerMembership, WhoComesBeforeItJoinsIsAdmitted) {
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

TEST_F(SchedulerMembership, AFailureBeforeItJoinsLasts) {
  Listen(MembershipSettings());
  membership_->StopByOrder("stopped by order (SIGTERM)");
  membership_->Join();
  EXPECT_EQ(membership_->View().phase, JobView::kFailed);
}

TEST_F(SchedulerMembership, AFailureWhileANodeIsAdmittedReachesIt) {
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

TEST_F(SchedulerMembership, MembersCannotSayWhatTheSchedulerSays) {
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

TEST_F(SchedulerMembership, EachRoleLeavesInItsOwnWay) {
  Gather();
  Say(server_, Control::LEAVE, "finish");
  Say(worker_, Control::LEAVE, "stopped by order (SIGTERM)");
  for (const auto& peer : membership_->View().peers) EXPECT_FALSE(peer.left);
  EXPECT_EQ(failure(), "");
  Say(worker_, Control::LEAVE, "finish");
  EXPECT_FALSE(ended());
  Say(other_, Control::LEAVE, "finish");
  EXPECT_TRUE(ended());
  EXPECT_EQ(links_.CountTo(server_, Control::JOB_END), 1);
}

TEST_F(SchedulerMembership, AWorkerThatFailsFailsTheJob) {
  Gather();
  Say(worker_, Control::LEAVE, "finish");
  EXPECT_EQ(failure(), "");
  Say(other_, Control::LEAVE, "failed: exit status 3");
  EXPECT_EQ(failure(), "worker 1 (10.0.0.2) failed: exit status 3");
  EXPECT_FALSE(ended());
  EXPECT_EQ(links_.CountTo(server_, Control::JOB_FAILED), 1);
  EXPECT_EQ(links_.CountTo(server_, Control::JOB_END), 0);
}

TEST_F(SchedulerMembership, AnOperationThatFailedIsTheWorkersAffair) {
  Gather();
  Say(worker_, Control::LEAVE, "suspend after: push_pull of 'a' timed out");
  Say(other_, Control::LEAVE, "suspend after: push_pull of 'a' timed out");
  EXPECT_EQ(failure(), "");
  EXPECT_TRUE(ended());
  EXPECT_EQ(membership_->View().incarnation, 2) << "it was suspended";
}

TEST_F(SchedulerMembership, ToAKeptClusterItIsAFailure) {
  StartKept(1);
  GatherNodes();
  Say(worker_, Control::LEAVE, "finish after: push_pull of 'a' timed out");
  EXPECT_EQ(failure(), "worker 0 (10.0.0.2) failed: push_pull of 'a' timed out");
}

TEST_F(SchedulerMembership, OnlyMembersAreHeard) {
  Gather();
  Say(Postoffice::WorkerRankToID(5), Control::LEAVE, "stopped");
  Say(Postoffice::WorkerRankToID(5), Control::JOB_FAILED, "nonsense");
  EXPECT_EQ(failure(), "");
  Say(worker_, Control::JOB_FAILED, "server 0 was lost to worker 0");
  EXPECT_EQ(failure(), "server 0 was lost to worker 0");
}

}  // namespace
}  // namespace ps
