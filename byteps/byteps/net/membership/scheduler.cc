// The scheduler's part of the membership: who is admitted, lost, or has left.
#include <algorithm>
#include <climits>
#include <utility>

#include "byteps/base/mutex.h"
#include "byteps/base/probe.h"
#include "byteps/net/link/invariant.h"
#include "byteps/net/link/node_text.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/protocol.h"
#include "dmlc/logging.h"
#include "ps/internal/postoffice.h"

namespace ps {

using membership::kProtocol;
using membership::PackLink;

namespace {

// Those that stay away are named up to this many: a thousand names help nobody.
constexpr int kNamedWorkers = 16;
// Workers that leave within so long are told of by one message to each server.
constexpr double kDepartureSeconds = 0.02;

}  // namespace

int Membership::Count(Node::Role role) {
  return static_cast<int>(std::count_if(peers_.begin(), peers_.end(), [role](const auto& entry) {
    return entry.second.node.role == role;
  }));
}

int Membership::FirstFreeRank(Node::Role role) {
  const auto id = [role](int rank) {
    return role == Node::WORKER ? Postoffice::WorkerRankToID(rank)
                                : Postoffice::ServerRankToID(rank);
  };
  int rank = 0;
  while (peers_.count(id(rank))) ++rank;
  return rank;
}

std::string Membership::ReasonToRefuse(const Node& node, const Claim& claim, bool* later) {
  // What is said of numbers and places may be true of the last incarnation only, which has not
  // ended for the scheduler yet: its nodes are given some time to connect again.
  *later = false;
  if (claim.protocol != kProtocol) {
    return "it speaks membership protocol " + std::to_string(claim.protocol) + ", the scheduler " +
           std::to_string(kProtocol) + ": install the same byteps on every node";
  }
  if (node.role == Node::SCHEDULER) return "it says that it is a scheduler";
  *later = settings_.keep;
  const bool worker = node.role == Node::WORKER;
  const int workers = expected_workers_ < 0 && worker ? claim.workers : expected_workers_;
  const int servers = expected_servers_ < 0 && worker ? claim.servers : expected_servers_;
  if (claim.workers >= 0 && workers >= 0 && claim.workers != workers) {
    return "it was started for " + Plural(claim.workers, "worker") + ", the scheduler for " +
           Plural(workers, "worker") + " (WORLD_SIZE, DMLC_NUM_WORKER)";
  }
  if (claim.servers >= 0 && servers >= 0 && claim.servers != servers) {
    *later = false;
    return "it was started for " + Plural(claim.servers, "server") + ", the scheduler for " +
           Plural(servers, "server") + " (DMLC_NUM_SERVER)";
  }
  if (!worker) {
    if (servers >= 0 && Count(Node::SERVER) >= servers) {
      return "the job has its " + Plural(servers, "server") + " already";
    }
    return "";
  }
  if (node.aux_id < 0 || node.aux_id >= workers) {
    return "its rank " + std::to_string(node.aux_id) + " is not below the number of workers, " +
           std::to_string(workers) + " (RANK, DMLC_WORKER_ID)";
  }
  auto it = peers_.find(Postoffice::WorkerRankToID(node.aux_id));
  if (it != peers_.end()) {
    return "the job has a " + Describe(it->second.node) +
           " already; does another job use this scheduler?";
  }
  return "";
}

void Membership::Register(const Message& msg) {
  if (msg.meta.control.node.size() != 1) return;
  Node node = msg.meta.control.node[0];
  Claim claim;
  // Another protocol may say something else than this one.
  if (!ParseClaim(msg.meta.body, &claim) && claim.protocol == kProtocol) claim.protocol = -1;
  if (claim.probe > 0) return AnswerProbe(node, claim);
  std::string refusal;
  bool later = false;
  int incarnation = 0;
  {
    MutexLock lock(&mu_);
    if (state_ == State::kStopped) return;
    incarnation = incarnation_;
    refusal = Assign(claim, &node, &later);
  }
  if (!refusal.empty()) return Refuse(node, refusal, later);
  // It has a link before it is a peer: whoever is told of a failure can be told.
  links_->Connect(node);
  bool complete = false;
  {
    MutexLock lock(&mu_);
    if (state_ == State::kStopped) return;
    if (incarnation == incarnation_ && state_ == State::kActive) {
      complete = Admit(claim, node);
    } else {
      refusal = "the job has failed: " + failure_;
      later = state_ != State::kFailed;
    }
  }
  if (!refusal.empty()) return Refuse(node, refusal, later);
  Send(Control::WELCOME, node.id, std::to_string(incarnation), {node});
  PS_VLOG(1) << "admitted " << Describe(node);
  EmitProgress(MembershipEvent::kAdmitted, node);
  if (!complete) return;
  AdmitAll();
  EmitProgress(MembershipEvent::kComplete, node);
}

std::string Membership::Assign(const Claim& claim, Node* node, bool* later) {
  if (state_ == State::kFailed || state_ == State::kTurning) {
    *later = state_ == State::kTurning;
    if (*later) PS_PROBE(kCameWhileTurning);
    return "the job has failed: " + failure_;
  }
  if (state_ != State::kActive) return "the job has ended";
  if (std::any_of(peers_.begin(), peers_.end(),
                  [](const auto& entry) { return entry.second.left_to_suspend; })) {
    *later = true;
    return "the job before it is being suspended";
  }
  const bool worker = node->role == Node::WORKER;
  if (worker && node->aux_id < 0) node->aux_id = FirstFreeRank(Node::WORKER);
  const std::string refusal = ReasonToRefuse(*node, claim, later);
  if (!refusal.empty()) return refusal;
  node->id = worker ? Postoffice::WorkerRankToID(node->aux_id)
                    : Postoffice::ServerRankToID(FirstFreeRank(Node::SERVER));
  return "";
}

bool Membership::Admit(const Claim& claim, const Node& node) {
  const bool worker = node.role == Node::WORKER;
  if (expected_workers_ < 0 && worker) expected_workers_ = claim.workers;
  if (expected_servers_ < 0 && worker) expected_servers_ = claim.servers;
  Peer peer;
  peer.node = node;
  peer.heard = Clock::now();
  peer.link_mbps = claim.link_mbps;
  const bool is_free = peers_.emplace(node.id, peer).second;
  PS_INVARIANT("a place in the job is one node's", is_free, "that of " + Describe(node));
  last_arrival_ = peer.heard;
  any_worker_ = any_worker_ || worker;
  if (!IsComplete()) return false;
  failure_.clear();  // of the last incarnation
  return true;
}

bool Membership::IsComplete() {
  return expected_workers_ >= 0 && expected_servers_ >= 0 &&
         Count(Node::WORKER) == expected_workers_ && Count(Node::SERVER) == expected_servers_;
}

void Membership::Refuse(const Node& node, const std::string& why, bool later) {
  const std::string reason = Describe(node) + " was refused by the " + SchedulerName() + ": " + why;
  // Who comes again and again must not fill the log.
  if (later) {
    PS_VLOG(1) << reason << "; it may come again";
  } else {
    LOG(WARNING) << reason;
  }
  SendAway(node, (later ? membership::kAgain : "") + reason);
}

void Membership::SendAway(const Node& node, const std::string& body) {
  Node target = node;
  {
    MutexLock lock(&mu_);
    target.id = kRefusedBase + refused_++;
  }
  links_->Connect(target);
  Send(Control::REFUSED, target.id, body);
  links_->Disconnect(target.id);
}

void Membership::AdmitAll() {
  // Only workers connect to others, and only to servers: nobody else needs addresses.
  std::vector<Node> servers;
  std::vector<int> everyone;
  int link_mbps = INT_MAX;
  {
    MutexLock lock(&mu_);
    for (const auto& entry : peers_) {
      everyone.push_back(entry.first);
      if (entry.second.node.role == Node::SERVER) {
        servers.push_back(entry.second.node);
      } else {
        link_mbps = std::min(link_mbps, entry.second.link_mbps);
      }
    }
  }
  const std::string link = PackLink(link_mbps);
  for (const int id : everyone) {
    const bool worker = id % 2 == Postoffice::WorkerRankToID(0) % 2;
    Send(Control::ADD_NODE, id, link, worker ? servers : std::vector<Node>());
  }
}

std::string Membership::WhoIsMissing() {
  std::string missing;
  int unnamed = 0, named = 0;
  for (int rank = 0; rank < expected_workers_; ++rank) {
    if (peers_.count(Postoffice::WorkerRankToID(rank))) continue;
    if (named == kNamedWorkers) {
      ++unnamed;
      continue;
    }
    ++named;
    missing += (missing.empty() ? "worker " : ", worker ") + std::to_string(rank);
  }
  if (unnamed > 0) missing += ", " + Plural(unnamed, "more worker");
  const int servers = expected_servers_ - Count(Node::SERVER);
  if (servers > 0) missing += (missing.empty() ? "" : ", ") + Plural(servers, "server");
  return missing;
}

void Membership::OnLost(int node_id, const std::string& how) {
  OnGone(node_id, "was lost: " + how, StoodStill());
}

void Membership::OnGone(int node_id, const std::string& what, const std::string& before) {
  std::string reason;
  bool in_job = false;
  {
    MutexLock lock(&mu_);
    auto it = peers_.find(node_id);
    if (state_ != State::kActive || it == peers_.end() || it->second.left) {
      return PS_PROBE(kGoneAlready);
    }
    reason = before + Describe(it->second.node) + " " + what;
    in_job = any_worker_;
    if (!in_job) peers_.erase(it);
  }
  if (in_job) {
    FailJob(reason);
    return;
  }
  PS_PROBE(kForgotten);
  LOG(WARNING) << reason << "; no worker has come yet, so another server may take its place";
  // Should it be there after all, it must not wait for a job that does without it.
  Send(Control::JOB_FAILED, node_id, reason);
  links_->Disconnect(node_id);
}

void Membership::OnReport(int node_id, const std::string& report) {
  if (report.empty() || report.size() > kMaxReport) return;
  {
    MutexLock lock(&mu_);
    if (!peers_.count(node_id)) return;
  }
  MembershipEvent event;
  event.kind = MembershipEvent::kReported;
  event.node_id = node_id;
  event.report = report;
  Emit(event);
}

JobView Membership::View() {
  const auto now = Clock::now();
  JobView view;
  MutexLock lock(&mu_);
  view.incarnation = incarnation_;
  const bool of_last = state_ == State::kActive && !failure_.empty();
  view.failure = (of_last ? "the last incarnation failed: " : "") + failure_;
  view.workers = expected_workers_;
  view.servers = expected_servers_;
  for (const auto& entry : peers_) {
    JobView::Peer peer;
    peer.node = entry.second.node;
    peer.silent_s = std::chrono::duration<double>(now - entry.second.heard).count();
    peer.left = entry.second.left;
    view.peers.push_back(peer);
  }
  if (state_ == State::kFailed) {
    view.phase = JobView::kFailed;
  } else if (state_ == State::kEnded) {
    view.phase = JobView::kEnded;
  } else {
    view.phase = IsComplete() ? JobView::kRunning : JobView::kGathering;
    if (view.phase == JobView::kGathering) view.missing = WhoIsMissing();
  }
  return view;
}

void Membership::CheckPeers(Clock::time_point now) {
  std::vector<int> silent;
  std::string reason;
  std::string last_reason;
  {
    MutexLock lock(&mu_);
    for (const auto& entry : peers_) {
      const bool heard = now - entry.second.heard < ToDuration(settings_.peer_timeout_s);
      if (!entry.second.left && !heard) silent.push_back(entry.first);
    }
    last_reason = ReasonToGiveUp(now);
    const std::string missing = any_worker_ ? WhoIsMissing() : "";
    if (!missing.empty() && now - last_arrival_ > ToDuration(settings_.start_timeout_s)) {
      reason = "the job did not start: only " + std::to_string(Count(Node::WORKER)) + " of " +
               Plural(expected_workers_, "worker") + " and " + std::to_string(Count(Node::SERVER)) +
               " of " + Plural(expected_servers_, "server") + " registered with the " +
               SchedulerName() + ", and nobody else within " +
               Limit(settings_.start_timeout_s, "BYTEPS_START_TIMEOUT_S") + "; missing: " + missing;
    }
  }
  for (int id : silent) {
    OnLost(id, "no heartbeat for " + Limit(settings_.peer_timeout_s, "BYTEPS_PEER_TIMEOUT_S"));
  }
  if (!reason.empty()) {
    PS_PROBE(kDidNotStart);
    FailJob(reason);
  }
  if (!last_reason.empty()) FailJob(last_reason, true);
}

void Membership::FailJob(const std::string& reason, bool for_good, const char* file, int line) {
  std::vector<int> receivers;
  const bool goes_on = settings_.keep && !for_good;
  int next = 0;
  {
    MutexLock lock(&mu_);
    if (state_ != State::kActive) return;
    // Before anybody is told: who ends for this reason must not become another one.
    state_ = goes_on ? State::kTurning : State::kFailed;
    failure_ = reason;
    if (goes_on) next = incarnation_ + 1;
    for (const auto& entry : peers_) {
      if (!entry.second.left) receivers.push_back(entry.first);
    }
  }
  cond_.NotifyAll();
  for (int id : receivers) Send(Control::JOB_FAILED, id, reason);
  EmitFailure(reason, next, file, line);
  if (goes_on) BeginIncarnation();
}

void Membership::BeginIncarnation() {
  PS_PROBE(kIncarnationEnds);
  std::vector<Node> old;
  int incarnation = 0;
  {
    MutexLock lock(&mu_);
    if (state_ != State::kTurning) return;  // Stop was called
    for (const auto& entry : peers_) {
      old.push_back(entry.second.node);
      old.back().id = kRefusedBase + refused_++;
    }
    peers_.clear();
    departed_.clear();
    warned_of_.clear();
    any_worker_ = false;
    expected_workers_ = -1;
    incarnation = ++incarnation_;
    incarnation_begun_ = Clock::now();
  }
  SetIncarnation(incarnation);
  // They lose their names first: the next node of that name may come while they are told.
  for (const Node& node : old) {
    links_->Connect(node);
    links_->Disconnect(node.id);
  }
  {
    MutexLock lock(&mu_);
    if (state_ == State::kTurning) state_ = State::kActive;
  }
  cond_.NotifyAll();
}

std::string Membership::ReasonToGiveUp(Clock::time_point now) {
  const double limit = settings_.keep_timeout_s;
  if (!settings_.keep || limit <= 0 || any_worker_ || failure_.empty()) return "";
  if (now - incarnation_begun_ < ToDuration(limit)) return "";
  return "no worker came within " + Limit(limit, "BYTEPS_KEEP_TIMEOUT_S") + " after incarnation " +
         std::to_string(incarnation_ - 1) + " of the job failed: " + failure_;
}

bool Membership::IsOfThisIncarnation(const Message& msg) {
  const int sender = msg.meta.sender;
  if (sender == Node::kEmpty) return true;
  MutexLock lock(&mu_);
  if (peers_.count(sender)) return true;
  PS_PROBE(kOldIncarnation);
  PS_VLOG(1) << "a message of node " << sender << ", which is not of this incarnation of the job";
  return false;
}

void Membership::OnLeave(int node_id, bool suspend) {
  Node who;
  bool all_left = true;
  {
    MutexLock lock(&mu_);
    auto it = peers_.find(node_id);
    if (it == peers_.end() || it->second.left) return;
    it->second.left = true;
    it->second.left_to_suspend = suspend;
    who = it->second.node;
    if (departed_.empty()) departed_due_ = Clock::now() + ToDuration(kDepartureSeconds);
    departed_.push_back(who);
    for (const auto& entry : peers_) {
      const bool worker = entry.second.node.role == Node::WORKER;
      all_left = all_left && (!worker || entry.second.left);
    }
    all_left = all_left && Count(Node::WORKER) == expected_workers_;
  }
  Send(Control::NODE_LEFT, node_id, "", {who});
  EmitProgress(MembershipEvent::kNodeLeft, who);
  if (all_left) {
    PS_PROBE(kLastLeaves);
    return EndJob();
  }
  cond_.NotifyAll();  // the timer has something to do soon
}

void Membership::TellOfDepartures() {
  std::vector<Node> departed;
  std::vector<int> servers;
  {
    MutexLock lock(&mu_);
    departed.swap(departed_);
    for (const auto& entry : peers_) {
      if (entry.second.node.role == Node::SERVER) servers.push_back(entry.first);
    }
  }
  if (departed.size() > 1) PS_PROBE(kDeparturesTogether);
  for (const int id : servers) Send(Control::NODE_LEFT, id, "", departed);
}

void Membership::EndJob() {
  std::vector<int> servers;
  bool suspended = false;
  int incarnation = 0;
  {
    MutexLock lock(&mu_);
    // It has failed, or Stop was called, which waits for the timer thread: it sees the state.
    if (state_ != State::kActive) return PS_PROBE(kEndedAlready);
    for (const auto& entry : peers_) {
      suspended = suspended || entry.second.left_to_suspend;
      if (entry.second.node.role == Node::SERVER) servers.push_back(entry.first);
    }
    peers_.clear();
    departed_.clear();
    any_worker_ = false;
    if (suspended) {
      expected_workers_ = expected_servers_ = -1;
      incarnation = ++incarnation_;
    } else {
      state_ = State::kEnded;
    }
  }
  for (int id : servers) Send(Control::JOB_END, id, suspended ? "suspend" : "finish");
  if (suspended) SetIncarnation(incarnation);
  MembershipEvent event;
  event.kind = MembershipEvent::kEnded;
  event.suspended = suspended;
  Emit(event);
}

}  // namespace ps
