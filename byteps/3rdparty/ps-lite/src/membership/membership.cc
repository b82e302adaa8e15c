#include "ps/membership.h"

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <utility>

#include "../net_address.h"
#include "./text.h"
#include "dmlc/logging.h"
#include "ps/internal/postoffice.h"
#include "ps/internal/van.h"

namespace ps {

using membership::Describe;
using membership::Limit;
using membership::ToDuration;

namespace {

constexpr double kGoodbyeSeconds = 5.0;
// How long after its connection closed the scheduler's last word may still come, or its
// word on a peer whose connection broke.
constexpr double kLastWordSeconds = 0.5;
// The same for the word of a peer that closed a connection.
constexpr double kPeersWordSeconds = 1.5;
// How long it may take the scheduler to fail the job once it is told of that.
constexpr double kVerdictSeconds = 5.0;

std::mutex listener_mu;
Membership::Listener listener;  // guarded by listener_mu

double Seconds(const char* name, double fallback) {
  const char* text = Environment::Get()->find(name);
  return text == nullptr ? fallback : atof(text);
}

}  // namespace

void Membership::SetListener(Listener new_listener) {
  std::lock_guard<std::mutex> lock(listener_mu);
  listener = std::move(new_listener);
}

Membership::Membership(Van* van)
    : van_(van),
      is_scheduler_(Postoffice::Get()->is_scheduler()),
      peer_timeout_s_(Seconds("BYTEPS_PEER_TIMEOUT_S", 30)),
      start_timeout_s_(Seconds("BYTEPS_START_TIMEOUT_S", 30)) {
  expected_workers_ = GetEnv("DMLC_NUM_WORKER", -1);
  expected_servers_ = GetEnv("DMLC_NUM_SERVER", -1);
}

Membership::~Membership() { Stop(); }

void Membership::Stop() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    state_ = State::kStopped;
  }
  cond_.notify_all();
  if (timer_.joinable()) timer_.join();
}

std::string Membership::PackClaim(const Claim& claim) {
  std::ostringstream text;
  text << "protocol=" << claim.protocol << " workers=" << claim.workers
       << " servers=" << claim.servers;
  return text.str();
}

bool Membership::ParseClaim(const std::string& text, Claim* claim) {
  return sscanf(text.c_str(), "protocol=%d workers=%d servers=%d", &claim->protocol,
                &claim->workers, &claim->servers) == 3;
}

void Membership::Send(Control::Command command, int recver, const std::string& body,
                      const std::vector<Node>& nodes) {
  Message msg;
  msg.meta.recver = recver;
  msg.meta.control.cmd = command;
  msg.meta.control.node = nodes;
  msg.meta.body = body;
  msg.meta.timestamp = van_->GetTimestamp();
  van_->Send(msg);
}

void Membership::Emit(const MembershipEvent& event) {
  Listener target;
  {
    std::lock_guard<std::mutex> lock(listener_mu);
    target = listener;
  }
  if (target) target(event);
}

void Membership::Fail(const std::string& reason) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (state_ != State::kJoining && state_ != State::kActive) return;
    state_ = State::kFailed;
    failure_ = reason;
  }
  cond_.notify_all();
  MembershipEvent event;
  event.kind = MembershipEvent::kFailed;
  event.reason = reason;
  Emit(event);
}

std::string Membership::SchedulerName() const {
  return "scheduler (" + JoinHostPort(van_->scheduler().hostname, van_->scheduler().port) + ")";
}

std::string Membership::NameOf(int node_id) {
  std::lock_guard<std::mutex> lock(mu_);
  if (node_id == kScheduler) return SchedulerName();
  auto it = peers_.find(node_id);
  if (it != peers_.end()) return Describe(it->second.node);
  return std::string(node_id % 2 ? "worker " : "server ") +
         std::to_string(Postoffice::IDtoRank(node_id));
}

void Membership::Join() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    scheduler_heard_ = Clock::now();
    if (is_scheduler_) state_ = State::kActive;
  }
  if (!is_scheduler_) {
    Node self = van_->node();
    self.aux_id = self.role == Node::WORKER ? GetEnv("DMLC_WORKER_ID", -1) : -1;
    Claim claim;
    claim.protocol = membership::kProtocol;
    // A server that outlived a suspended job takes what the next one brings.
    const bool rejoin = GetEnv("BYTEPS_REJOIN", 0) != 0;
    claim.workers = rejoin ? -1 : expected_workers_;
    claim.servers = rejoin ? -1 : expected_servers_;
    Send(Control::ADD_NODE, kScheduler, PackClaim(claim), {self});
  }
  timer_ = std::thread(&Membership::TimerLoop, this);
  pthread_setname_np(timer_.native_handle(), "bps-members");
  if (is_scheduler_) return;

  const auto deadline = Clock::now() + ToDuration(start_timeout_s_);
  std::unique_lock<std::mutex> lock(mu_);
  cond_.wait_until(lock, deadline, [this] { return welcomed_ || state_ != State::kJoining; });
  if (state_ == State::kJoining && !welcomed_) {
    throw dmlc::Error("the " + SchedulerName() + " did not answer within " +
                      Limit(start_timeout_s_, "BYTEPS_START_TIMEOUT_S"));
  }
  // The scheduler answers; it also gives up when nodes stay away, and says who.
  // Should it vanish meanwhile, the timer thread notices.
  cond_.wait(lock, [this] { return state_ != State::kJoining; });
  // A short job may even have ended before this thread woke.
  if (state_ == State::kFailed) throw dmlc::Error(failure_);
}

void Membership::Leave(bool suspend) {
  std::unique_lock<std::mutex> lock(mu_);
  if (state_ != State::kActive) return;
  lock.unlock();
  Send(Control::LEAVE, kScheduler, suspend ? "suspend" : "finish");
  lock.lock();
  cond_.wait_for(lock, ToDuration(kGoodbyeSeconds),
                 [this] { return left_acknowledged_ || state_ != State::kActive; });
  if (state_ == State::kActive) state_ = State::kEnded;
}

bool Membership::Handle(const Message& msg) {
  const auto& control = msg.meta.control;
  if (is_scheduler_ && msg.meta.sender != Node::kEmpty) {
    std::lock_guard<std::mutex> lock(mu_);
    auto it = peers_.find(msg.meta.sender);
    if (it != peers_.end()) it->second.heard = Clock::now();
  } else if (!is_scheduler_ && msg.meta.sender == kScheduler) {
    std::lock_guard<std::mutex> lock(mu_);
    scheduler_heard_ = Clock::now();
  }
  switch (control.cmd) {
    case Control::ADD_NODE:
      if (is_scheduler_) {
        Register(msg);
      } else {
        OnAdmission(msg);
      }
      return true;
    case Control::WELCOME: {
      if (control.node.size() == 1) van_->SetNode(control.node[0]);
      std::lock_guard<std::mutex> lock(mu_);
      welcomed_ = true;
      cond_.notify_all();
      return true;
    }
    case Control::REFUSED:
    case Control::JOB_FAILED:
      if (is_scheduler_) {
        FailJob(msg.meta.body);
      } else {
        Fail(msg.meta.body);
      }
      return true;
    case Control::HEARTBEAT:
      if (is_scheduler_) Send(Control::HEARTBEAT, msg.meta.sender);
      return true;
    case Control::LEAVE:
      if (is_scheduler_) OnLeave(msg.meta.sender, msg.meta.body == "suspend");
      return true;
    case Control::NODE_LEFT: {
      if (control.node.empty()) return true;
      if (control.node[0].id == van_->node().id) {
        std::lock_guard<std::mutex> lock(mu_);
        left_acknowledged_ = true;
        cond_.notify_all();
        return true;
      }
      {
        std::lock_guard<std::mutex> lock(mu_);
        auto it = peers_.find(control.node[0].id);
        if (it != peers_.end()) it->second.left = true;
      }
      MembershipEvent event;
      event.kind = MembershipEvent::kNodeLeft;
      event.rank = Postoffice::IDtoRank(control.node[0].id);
      event.reason = Describe(control.node[0]) + " left the job";
      Emit(event);
      return true;
    }
    case Control::JOB_END: {
      {
        std::lock_guard<std::mutex> lock(mu_);
        if (state_ != State::kActive) return true;
        state_ = State::kEnded;
        cond_.notify_all();
      }
      MembershipEvent event;
      event.kind = MembershipEvent::kEnded;
      event.suspended = msg.meta.body == "suspend";
      Emit(event);
      return true;
    }
    default:
      return false;
  }
}

void Membership::OnDisconnect(int node_id) {
  if (is_scheduler_) {
    OnLost(node_id, "its connection closed");
    return;
  }
  std::lock_guard<std::mutex> lock(mu_);
  const bool in_job = state_ == State::kActive || state_ == State::kJoining;
  if (node_id != kScheduler || !welcomed_ || left_acknowledged_ || !in_job) return;
  // It may have ended in good order, or told of a failure: its last word comes
  // on another connection and may be behind this news.
  scheduler_closed_ = true;
  scheduler_closed_at_ = Clock::now();
  scheduler_closed_how_ = "its connection closed";
  cond_.notify_all();
}

void Membership::OnLinkLost(int node_id, const std::string& how, bool closed) {
  if (is_scheduler_) return OnLost(node_id, how);
  if (node_id == kScheduler) {
    bool welcomed = false;
    {
      std::lock_guard<std::mutex> lock(mu_);
      welcomed = welcomed_;
    }
    // It never was reached, or would not have this node: that is all there is to say.
    if (!welcomed) return Fail("the " + SchedulerName() + " cannot be joined: " + how);
    OnDisconnect(node_id);
    std::lock_guard<std::mutex> lock(mu_);
    scheduler_closed_how_ = how;
    return;
  }
  std::lock_guard<std::mutex> lock(mu_);
  if (broken_link_ != Node::kEmpty) return;
  broken_link_ = node_id;
  broken_how_ = how;
  broken_deadline_ = Clock::now() + ToDuration(closed ? kPeersWordSeconds : kLastWordSeconds);
  broken_reported_ = false;
  cond_.notify_all();
}

void Membership::ReportBrokenLink() {
  std::string reason;
  bool reported = false;
  {
    std::lock_guard<std::mutex> lock(mu_);
    auto peer = peers_.find(broken_link_);
    if (peer != peers_.end() && peer->second.left) {
      broken_link_ = Node::kEmpty;  // it went in good order
      return;
    }
    const bool known = peer != peers_.end();
    reason = (known ? Describe(peer->second.node) : "node " + std::to_string(broken_link_)) +
             " was lost to " + Describe(van_->node()) + ": " + broken_how_;
    reported = broken_reported_;
    broken_reported_ = true;
    broken_deadline_ = Clock::now() + ToDuration(kVerdictSeconds);
  }
  if (reported) return Fail(reason);
  Send(Control::JOB_FAILED, kScheduler, reason);
}

void Membership::TimerLoop() {
  const auto interval = ToDuration(std::min(std::max(peer_timeout_s_ / 6, 0.05), 5.0));
  auto next = Clock::now() + interval;
  std::unique_lock<std::mutex> lock(mu_);
  while (state_ != State::kStopped) {
    if (state_ != State::kActive && state_ != State::kJoining) {
      cond_.wait(lock);  // nothing to watch any more
      continue;
    }
    const auto now = Clock::now();
    auto wake = next;
    const auto last_word = scheduler_closed_at_ + ToDuration(kLastWordSeconds);
    if (scheduler_closed_) wake = std::min(wake, last_word);
    const bool broken = broken_link_ != Node::kEmpty;
    const bool verdict_due = broken && now >= broken_deadline_;
    if (broken) wake = std::min(wake, broken_deadline_);
    if (now < wake) {
      cond_.wait_until(lock, wake);
      continue;
    }
    const bool lost = scheduler_closed_ && now >= last_word;
    const std::string how = scheduler_closed_how_;
    lock.unlock();
    if (lost) {
      Fail(SchedulerName() + " was lost: " + how);
    } else if (verdict_due) {
      ReportBrokenLink();
    }
    if (now < next) {
      lock.lock();
      continue;
    }
    if (is_scheduler_) {
      CheckPeers(now);
    } else {
      CheckScheduler(now);
    }
    lock.lock();
    next = now + interval;
  }
}

// ------------------------------------------------------------- other nodes

void Membership::OnAdmission(const Message& msg) {
  for (const auto& node : msg.meta.control.node) {
    if (node.role == Node::SCHEDULER) continue;
    van_->Connect(node);
    std::lock_guard<std::mutex> lock(mu_);
    peers_[node.id].node = node;
  }
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (state_ != State::kJoining) return;
    state_ = State::kActive;
  }
  cond_.notify_all();
}

void Membership::CheckScheduler(Clock::time_point now) {
  bool welcomed = false;
  bool silent = false;
  {
    std::lock_guard<std::mutex> lock(mu_);
    welcomed = welcomed_;
    silent = now - scheduler_heard_ > ToDuration(peer_timeout_s_);
  }
  if (!welcomed) return;  // Join has its own deadline
  if (silent) {
    Fail(SchedulerName() + " was lost: no heartbeat for " +
         Limit(peer_timeout_s_, "BYTEPS_PEER_TIMEOUT_S"));
    return;
  }
  Send(Control::HEARTBEAT, kScheduler);
}

}  // namespace ps
