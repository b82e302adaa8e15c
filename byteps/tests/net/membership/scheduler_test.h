// The scheduler's side of membership, without a network or nodes: the test says what nodes say, and
// looks at what is answered.
#ifndef BYTEPS_TESTS_NET_MEMBERSHIP_SCHEDULER_TEST_H_
#define BYTEPS_TESTS_NET_MEMBERSHIP_SCHEDULER_TEST_H_

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "byteps/base/mutex.h"
#include "byteps/net/membership/scheduler_membership.h"
#include "ps/internal/postoffice.h"
#include "tests/net/membership/recorded_links.h"

namespace ps {

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
  bool backups_ = false;

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
    Accuse(worker, server_, port, "server 0 was lost to worker 0");
  }
  void Accuse(int accuser, int server, int port, const std::string& reason) {
    Message message;
    message.meta.control.cmd = Control::JOB_FAILED;
    message.meta.sender = accuser;
    message.meta.body = reason;
    Node node;
    node.id = server;
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
                        " link=0 probe=0 replicas=" + std::to_string(replicas_) +
                        " backups=" + (backups_ ? "1" : "0");
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

}  // namespace ps
#endif  // BYTEPS_TESTS_NET_MEMBERSHIP_SCHEDULER_TEST_H_
