// Fixtures that test membership without a network: links that record what is sent to them, and a
// scheduler whose nodes are played by the test.
#ifndef BYTEPS_TESTS_NET_MEMBERSHIP_MEMBERSHIP_TEST_H_
#define BYTEPS_TESTS_NET_MEMBERSHIP_MEMBERSHIP_TEST_H_

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/membership_links.h"
#include "byteps/net/membership/membership_settings.h"
#include "byteps/net/membership/scheduler_membership.h"
#include "byteps/net/membership/words.h"
#include "ps/base.h"
#include "ps/internal/postoffice.h"

namespace ps {

class RecordedLinks : public MembershipLinks {
 public:
  // Makes links of a node of this role, at 10.0.0.2.
  explicit RecordedLinks(Node::Role role) {
    scheduler_.role = Node::SCHEDULER;
    scheduler_.id = kScheduler;
    scheduler_.hostname = "10.0.0.1";
    scheduler_.port = 9000;
    if (role == Node::SCHEDULER) {
      self_ = scheduler_;
    } else {
      self_.role = role;
      self_.hostname = "10.0.0.2";
      self_.port = role == Node::SERVER ? 9001 : 0;
    }
  }

  Node self() const override {
    MutexLock lock(&mu_);
    return self_;
  }
  const Node& scheduler() const override { return scheduler_; }
  void SetSelf(const Node& node) override {
    MutexLock lock(&mu_);
    self_ = node;
  }
  void Connect(const Node& node) override {
    if (on_connect) on_connect(node);
    MutexLock lock(&mu_);
    linked_.push_back(node.id);
  }
  void Disconnect(int node_id) override {
    MutexLock lock(&mu_);
    unlinked_.push_back(node_id);
  }
  std::string DialError() override {
    MutexLock lock(&mu_);
    return dial_error_;
  }
  bool IsBroken(int node_id) override {
    MutexLock lock(&mu_);
    return broken_.count(node_id) > 0;
  }
  void SetDialError(const std::string& error) {
    MutexLock lock(&mu_);
    dial_error_ = error;
  }
  void SetBroken(const std::set<int>& nodes) {
    MutexLock lock(&mu_);
    broken_ = nodes;
  }
  void SetGeneration(int generation) override {
    MutexLock lock(&mu_);
    generation_ = generation;
  }
  uint64_t job() const override {
    MutexLock lock(&mu_);
    return job_;
  }
  void SetJob(uint64_t job) override {
    MutexLock lock(&mu_);
    job_ = job;
  }
  void Send(Message* message) override {
    Meta read;
    const std::string bytes = EncodeMeta(message->meta);
    if (!DecodeMeta(bytes.data(), bytes.size(), &read)) {
      fprintf(stderr, "its receiver could not parse %s\n", message->DebugString().c_str());
      abort();
    }
    {
      MutexLock lock(&mu_);
      sent_.push_back(*message);
      cond_.NotifyAll();
    }
    if (on_send) on_send(*message);
  }

  // Returns the messages sent to `id` with this command.
  std::vector<Message> SentTo(int id, Control::Command command) {
    MutexLock lock(&mu_);
    return Find(id, command);
  }
  int CountTo(int id, Control::Command command) {
    return static_cast<int>(SentTo(id, command).size());
  }
  // Blocks until there are `count`.
  std::vector<Message> Await(int id, Control::Command command, size_t count) {
    MutexLock lock(&mu_);
    cond_.Wait(&mu_, [&]() PS_REQUIRES(mu_) { return Find(id, command).size() >= count; });
    return Find(id, command);
  }
  // Returns the body of the last REFUSED to any node.
  std::string LastRefusal() {
    MutexLock lock(&mu_);
    std::string text;
    for (const Message& message : sent_) {
      if (message.meta.control.cmd == Control::REFUSED) text = message.meta.body;
    }
    return text;
  }
  std::vector<int> linked() {
    MutexLock lock(&mu_);
    return linked_;
  }
  std::vector<int> unlinked() {
    MutexLock lock(&mu_);
    return unlinked_;
  }
  int generation() {
    MutexLock lock(&mu_);
    return generation_;
  }

  // Called without a lock, before Connect is recorded, and after Send is.
  std::function<void(const Node&)> on_connect;
  std::function<void(const Message&)> on_send;

 private:
  std::vector<Message> Find(int id, Control::Command command) PS_REQUIRES(mu_) {
    std::vector<Message> found;
    for (const Message& message : sent_) {
      if (message.meta.recver == id && message.meta.control.cmd == command) {
        found.push_back(message);
      }
    }
    return found;
  }

  Node scheduler_;
  mutable Mutex mu_;
  CondVar cond_;
  Node self_ PS_GUARDED_BY(mu_);
  std::vector<Message> sent_ PS_GUARDED_BY(mu_);
  std::vector<int> linked_ PS_GUARDED_BY(mu_);
  std::vector<int> unlinked_ PS_GUARDED_BY(mu_);
  std::string dial_error_ PS_GUARDED_BY(mu_);
  std::set<int> broken_ PS_GUARDED_BY(mu_);
  int generation_ PS_GUARDED_BY(mu_) = 0;
  uint64_t job_ PS_GUARDED_BY(mu_) = 1 << 16 | 1;
};

using membership::MemberWord;

// Bodies of messages.
inline std::string Finish(const std::string& error = "") {
  return membership::Pack(membership::Leave(Farewell{false, "", error}));
}
inline std::string Suspend(const std::string& error = "") {
  return membership::Pack(membership::Leave(Farewell{true, "", error}));
}
inline std::string Failed(const std::string& why) {
  return membership::Pack(membership::Leave(Farewell{false, why, ""}));
}
inline std::string Stopped(const std::string& how) {
  return membership::Pack(membership::Leave(membership::Stopped{how}));
}
inline std::string Word(const MemberWord& word) { return membership::Pack(word); }
// Returns the message's content; fails the test if it is of another type.
template <typename T>
T WordIn(const Message& message) {
  const auto word = membership::Parse<MemberWord>(message.meta.body);
  const T* const one = word ? std::get_if<T>(&*word) : nullptr;
  EXPECT_NE(one, nullptr);
  return one != nullptr ? *one : T();
}

class SchedulerMembershipTest : public testing::Test {
 protected:
  void Start(MembershipSettings settings) {
    Listen(settings);
    membership_->Join();
  }

  // Makes the scheduler without Join.
  void Listen(MembershipSettings settings) {
    settings.peer_timeout_s = settings.start_timeout_s = 600;
    settings.make_roster_policy = policy_;
    membership_ = std::make_unique<SchedulerMembership>(
        &links_, settings, [this](const MembershipEvent& e) { OnEvent(e); });
  }

  MakeRosterPolicy policy_ = nullptr;
  int replicas_ = 1;
  bool backups_ = false;

  // Starts a job of two workers and a server that survives the server's loss for `seconds`.
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
  // Reports for a worker that its link with the server at this port broke.
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
  // Reports for the server that its link with a worker broke.
  void AccuseWorker(int worker) {
    Message message;
    message.meta.control.cmd = Control::JOB_FAILED;
    message.meta.sender = server_;
    message.meta.body = "a worker was lost to server 0";
    Node node;
    node.id = worker;
    node.role = Node::WORKER;
    message.meta.control.node = {node};
    membership_->Handle(message);
  }
  template <typename T>
  T LastWord(int id) {
    const auto told = links_.SentTo(id, Control::MEMBERS);
    EXPECT_FALSE(told.empty());
    return told.empty() ? T() : WordIn<T>(told.back());
  }

  void StartKept(int servers) {
    MembershipSettings settings;
    settings.keep = true;
    settings.servers = servers;
    Start(settings);
  }

  void Register(Node::Role role, int rank, int workers, int servers,
                const std::string& host = "10.0.0.2") {
    Message message;
    message.meta.control.cmd = Control::ADD_NODE;
    membership::Claim claim{membership::kProtocol, workers, servers, 0, 0, replicas_, backups_};
    message.meta.body = membership::PackRegistration({claim, {}});
    Node node;
    node.role = role;
    node.aux_id = role == Node::WORKER ? rank : -1;
    node.hostname = host;
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

  // Starts a job of two workers and a server.
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

  // Starts a job of a server and two replicas of two workers each.
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
  ReplicaView LastTold(int id) { return LastWord<ReplicaView>(id); }
  void Acknowledge() {
    Say(server_, Control::MEMBERS, Word(membership::Acknowledged{LastTold(server_).epoch}));
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

// Fixture of servers with backups, and a worker.
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
  // Returns the ranks of the servers that the server of `rank` was told of when it joined.
  std::vector<int> Told(int rank) {
    std::vector<int> ranks;
    const Message told = links_.SentTo(Id(rank), Control::ADD_NODE).back();
    for (const Node& node : told.meta.control.node) {
      EXPECT_EQ(node.role, Node::SERVER);
      ranks.push_back(Postoffice::IDtoRank(node.id));
    }
    return ranks;
  }
  template <typename T>
  void ExpectWord(int rank, int about) {
    EXPECT_EQ(LastWord<T>(Id(rank)).rank, about) << rank;
  }
  int CountWords(int rank) { return links_.CountTo(Id(rank), Control::MEMBERS); }

  int servers_ = 0;
};

}  // namespace ps

#endif  // BYTEPS_TESTS_NET_MEMBERSHIP_MEMBERSHIP_TEST_H_
