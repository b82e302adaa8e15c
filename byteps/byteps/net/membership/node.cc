// The membership's part of workers and servers: what they hear of the scheduler, and of links that
// break.
#include <functional>
#include <string>

#include "byteps/base/mutex.h"
#include "byteps/base/probe.h"
#include "byteps/net/link/node_text.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/protocol.h"
#include "ps/internal/postoffice.h"

namespace ps {

using membership::kLastWordSeconds;
using membership::ParseLink;

namespace {

// kLastWordSeconds for the word of a peer that closed a connection.
constexpr double kPeersWordSeconds = 1.5;
// How long it may take the scheduler to fail the job once it is told of that.
constexpr double kVerdictSeconds = 5.0;

}  // namespace

void Membership::OnNodeLeft(const Node& node) {
  if (node.id == links_->self().id) {
    MutexLock lock(&mu_);
    left_acknowledged_ = true;
    cond_.NotifyAll();
    return;
  }
  {
    MutexLock lock(&mu_);
    Peer& peer = peers_[node.id];
    peer.node = node;
    peer.left = true;
  }
  MembershipEvent event;
  event.kind = MembershipEvent::kNodeLeft;
  event.rank = Postoffice::IDtoRank(node.id);
  event.node = node;
  event.reason = Describe(node) + " left the job";
  Emit(event);
}

void Membership::OnDisconnect(int node_id) {
  if (settings_.is_scheduler) {
    OnLost(node_id, "its connection closed");
    return;
  }
  MutexLock lock(&mu_);
  const bool in_job = state_ == State::kActive || state_ == State::kJoining;
  if (node_id != kScheduler || left_acknowledged_ || !in_job) return;
  if (!welcomed_) {
    lock.Unlock();
    return Fail("the " + SchedulerName() +
                " cannot be joined: it closed the connection, as it does when its job has ended");
  }
  // It may have ended in good order, or told of a failure: its last word comes
  // on another connection and may be behind this news.
  PS_PROBE(kLastWord);
  scheduler_closed_ = true;
  scheduler_closed_at_ = Clock::now();
  scheduler_closed_how_ = "its connection closed";
  cond_.NotifyAll();
}

void Membership::OnLinkLost(int node_id, const std::string& how, bool closed) {
  if (settings_.is_scheduler) return OnLost(node_id, how);
  if (node_id == kScheduler) {
    bool welcomed = false;
    {
      MutexLock lock(&mu_);
      welcomed = welcomed_;
    }
    // It never was reached, or would not have this node: that is all there is to say.
    if (!welcomed) return Fail("the " + SchedulerName() + " cannot be joined: " + how);
    OnDisconnect(node_id);
    MutexLock lock(&mu_);
    scheduler_closed_how_ = how;
    return;
  }
  MutexLock lock(&mu_);
  if (broken_link_ != Node::kEmpty) return;
  broken_link_ = node_id;
  broken_how_ = how;
  broken_deadline_ = Clock::now() + ToDuration(closed ? kPeersWordSeconds : kLastWordSeconds);
  broken_reported_ = false;
  cond_.NotifyAll();
}

void Membership::ReportBrokenLink() {
  std::string reason;
  bool reported = false;
  const std::string self = Describe(links_->self());
  const std::string before = StoodStill();
  {
    MutexLock lock(&mu_);
    auto peer = peers_.find(broken_link_);
    if (peer != peers_.end() && peer->second.left) {
      PS_PROBE(kLinkOfLeaver);
      broken_link_ = Node::kEmpty;  // it went in good order
      return;
    }
    const bool known = peer != peers_.end();
    reason = before + (known ? Describe(peer->second.node) : RoleAndRank(broken_link_)) +
             " was lost to " + self + ": " + broken_how_;
    reported = broken_reported_;
    broken_reported_ = true;
    broken_deadline_ = Clock::now() + ToDuration(kVerdictSeconds);
  }
  if (reported) return Fail(reason);
  PS_PROBE(kLinkReported);
  Send(Control::JOB_FAILED, kScheduler, reason);
}

void Membership::OnAdmission(const Message& msg) {
  {
    // It says how many connections a link wants.
    MutexLock lock(&mu_);
    link_mbps_ = ParseLink(msg.meta.body);
  }
  for (const auto& node : msg.meta.control.node) {
    if (node.role == Node::SCHEDULER) continue;
    links_->Connect(node);
    MutexLock lock(&mu_);
    peers_[node.id].node = node;
  }
  {
    MutexLock lock(&mu_);
    if (state_ != State::kJoining) return;
    state_ = State::kActive;
  }
  cond_.NotifyAll();
}

int Membership::link_mbps() {
  MutexLock lock(&mu_);
  return link_mbps_;
}

void Membership::CheckScheduler(Clock::time_point now) {
  bool welcomed = false;
  bool silent = false;
  std::function<std::string()> reporter;
  {
    MutexLock lock(&mu_);
    welcomed = welcomed_;
    silent = now - scheduler_heard_ > ToDuration(settings_.peer_timeout_s);
    reporter = reporter_;
  }
  if (!welcomed) return;  // Join has its own deadline
  if (silent) {
    Fail(StoodStill() + SchedulerName() + " was lost: no heartbeat for " +
         Limit(settings_.peer_timeout_s, "BYTEPS_PEER_TIMEOUT_S"));
    return;
  }
  std::string report = reporter ? reporter() : "";
  if (report.size() > kMaxReport) report.clear();
  Send(Control::HEARTBEAT, kScheduler, report);
}

}  // namespace ps
