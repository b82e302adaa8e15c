// Fixture of a node without a network: the test plays the scheduler, and checks the messages.
#ifndef BYTEPS_TESTS_NET_MEMBERSHIP_NODE_TEST_H_
#define BYTEPS_TESTS_NET_MEMBERSHIP_NODE_TEST_H_

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/membership_settings.h"
#include "byteps/net/membership/node_membership.h"
#include "ps/internal/postoffice.h"
#include "tests/net/membership/membership_test.h"

namespace ps {

class NodeMembershipTest : public testing::Test {
 protected:
  // Makes a node that has not joined.
  void Make(Node::Role role) {
    membership_.reset();
    {
      MutexLock lock(&mu_);
      events_.clear();
    }
    links_ = std::make_unique<RecordedLinks>(role);
    links_->on_send = [this](const Message& message) {
      const auto answer = answers_.find(message.meta.control.cmd);
      if (answer != answers_.end()) answer->second();
    };
    membership_ = std::make_unique<NodeMembership>(links_.get(), settings_,
                                                   [this](const MembershipEvent& event) {
                                                     MutexLock lock(&mu_);
                                                     events_.push_back(event);
                                                     cond_.NotifyAll();
                                                   });
  }

  void Say(Control::Command command, const std::string& body, const std::vector<Node>& nodes = {},
           int sender = kScheduler) {
    Message message;
    message.meta.sender = sender;
    message.meta.control.cmd = command;
    message.meta.control.node = nodes;
    message.meta.body = body;
    membership_->Handle(message);
  }

  void Welcome(int generation = 1, int life = 1) {
    Node self = links_->self();
    const bool worker = self.role == Node::WORKER;
    self.id = worker ? worker_ : server_;
    if (worker) self.aux_id = 0;
    Say(Control::WELCOME, membership::Pack(membership::Welcome{generation, life}), {self});
  }
  void JoinAs(Node::Role role) {
    Make(role);
    answers_[Control::ADD_NODE] = [this] {
      Welcome();
      Say(Control::ADD_NODE, membership::Pack(membership::Beginning{25'000, false, {}}),
          {Server()});
    };
    membership_->Join();
  }

  Node Server() const {
    Node node;
    node.role = Node::SERVER;
    node.id = server_;
    node.hostname = "10.0.0.3";
    node.port = 9001;
    return node;
  }
  Node OtherWorker() const {
    Node node;
    node.role = Node::WORKER;
    node.id = Postoffice::WorkerRankToID(1);
    node.aux_id = 1;
    node.hostname = "10.0.0.4";
    node.port = 0;
    return node;
  }

  // Returns the message of the Error that Join throws; "" if it returns.
  template <typename Error>
  std::string JoinThrows() {
    try {
      membership_->Join();
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  }

  // Waits for the first event of this kind.
  MembershipEvent Await(MembershipEvent::Kind kind) {
    MutexLock lock(&mu_);
    cond_.Wait(&mu_, [&]() PS_REQUIRES(mu_) { return Find(kind) != nullptr; });
    return *Find(kind);
  }
  bool Heard(MembershipEvent::Kind kind) {
    MutexLock lock(&mu_);
    return Find(kind) != nullptr;
  }

  membership::Claim Claimed() {
    const auto said = links_->SentTo(kScheduler, Control::ADD_NODE);
    EXPECT_EQ(said.size(), 1u);
    return membership::ParseRegistration(said.at(0).meta.body).claim;
  }

  static MembershipSettings Patient() {
    MembershipSettings settings;
    settings.peer_timeout_s = settings.start_timeout_s = 600;
    settings.workers = 2;
    settings.servers = 1;
    settings.rank = 0;
    settings.link_mbps = 40'000;
    return settings;
  }

  const int server_ = Postoffice::ServerRankToID(0);
  const int worker_ = Postoffice::WorkerRankToID(0);
  MembershipSettings settings_ = Patient();
  // The scheduler's immediate answers, by command.
  std::map<Control::Command, std::function<void()>> answers_;
  Mutex mu_;
  CondVar cond_;
  std::vector<MembershipEvent> events_ PS_GUARDED_BY(mu_);
  std::unique_ptr<RecordedLinks> links_;
  std::unique_ptr<NodeMembership> membership_;

 private:
  const MembershipEvent* Find(MembershipEvent::Kind kind) PS_REQUIRES(mu_) {
    for (const MembershipEvent& event : events_) {
      if (event.kind == kind) return &event;
    }
    return nullptr;
  }
};

}  // namespace ps

#endif  // BYTEPS_TESTS_NET_MEMBERSHIP_NODE_TEST_H_
