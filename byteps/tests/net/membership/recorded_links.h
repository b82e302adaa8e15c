// Links that lead nowhere, and keep what is sent.
#ifndef BYTEPS_TESTS_NET_MEMBERSHIP_RECORDED_LINKS_H_
#define BYTEPS_TESTS_NET_MEMBERSHIP_RECORDED_LINKS_H_

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/net/link/meta_codec.h"
#include "byteps/net/membership/links.h"
#include "ps/base.h"

namespace ps {

class RecordedLinks : public MembershipLinks {
 public:
  // A node of this role, at 10.0.0.2.
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
  void SetIncarnation(int incarnation) override {
    MutexLock lock(&mu_);
    incarnation_ = incarnation;
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

  // Those sent to `id`, by command.
  std::vector<Message> SentTo(int id, Control::Command command) {
    MutexLock lock(&mu_);
    return Find(id, command);
  }
  int CountTo(int id, Control::Command command) {
    return static_cast<int>(SentTo(id, command).size());
  }
  // Blocks until there are so many.
  std::vector<Message> Await(int id, Control::Command command, size_t count) {
    MutexLock lock(&mu_);
    cond_.Wait(&mu_, [&]() PS_REQUIRES(mu_) { return Find(id, command).size() >= count; });
    return Find(id, command);
  }
  // The body of the last REFUSED, to any node.
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
  int incarnation() {
    MutexLock lock(&mu_);
    return incarnation_;
  }

  // Called with no lock held, before it is noted and after.
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
  int incarnation_ PS_GUARDED_BY(mu_) = 0;
  uint64_t job_ PS_GUARDED_BY(mu_) = 1 << 16 | 1;
};

}  // namespace ps
#endif  // BYTEPS_TESTS_NET_MEMBERSHIP_RECORDED_LINKS_H_
