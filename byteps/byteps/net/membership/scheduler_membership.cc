#include "byteps/net/membership/scheduler_membership.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/net_address.h"
#include "ps/internal/postoffice.h"

namespace ps {

using membership::Send;

namespace {

// Workers that leave within this time are announced together, in one message per server.
constexpr double kDepartureSeconds = 0.02;

}  // namespace

SchedulerMembership::SchedulerMembership(MembershipLinks* links, const MembershipSettings& settings,
                                         Listener listener)
    : job_(links, settings, std::move(listener)),
      policy_(settings.make_roster_policy != nullptr ? settings.make_roster_policy(this, &job_)
                                                     : std::make_unique<RosterPolicy>(this, &job_)),
      broken_invariants_(NumBrokenInvariants()),
      heartbeats_(HeartbeatSeconds(settings.peer_timeout_s),
                  {[this] { return NextDue(); },
                   [this](Clock::time_point now) {
                     TellOfDepartures();
                     policy_->OnDue(now);
                   },
                   [this](Clock::time_point now) { OnBeat(now); }}) {
  job_.roster.Expect({settings.keep ? -1 : settings.workers, settings.servers});
  SetGeneration(1);
}

SchedulerMembership::~SchedulerMembership() { Stop(); }

void SchedulerMembership::Join() { heartbeats_.Start(); }

void SchedulerMembership::StopByOrder(const std::string& how) {
  FailJob(Name() + " was " + how, true);
}

bool SchedulerMembership::HasWorkers() {
  MutexLock lock(&job_.mu);
  return job_.state == State::kActive &&
         (policy_->Gathers() || (job_.has_begun && job_.roster.Present().workers > 0));
}

void SchedulerMembership::Stop() {
  {
    MutexLock lock(&job_.mu);
    job_.state = State::kStopped;
  }
  heartbeats_.Stop();
}

std::string SchedulerMembership::NameOf(int node_id) {
  if (node_id == kScheduler) return membership::NameOfScheduler(*job_.links);
  MutexLock lock(&job_.mu);
  const Member* const member = job_.roster.Find(node_id);
  return member != nullptr ? Describe(member->node) : RoleAndRank(node_id);
}

void SchedulerMembership::SetGeneration(int generation) {
  BPS_INVARIANT_NOTED("generations only grow", generation > last_generation_,
                      std::to_string(generation) + " after " + std::to_string(last_generation_));
  last_generation_ = generation;
  job_.links->SetGeneration(generation);
}

void SchedulerMembership::EmitProgress(MembershipEvent::Kind kind, const Node& node) {
  MembershipEvent event;
  event.kind = kind;
  event.node = InfoOf(node);
  event.rank = Postoffice::IDtoRank(node.id);
  event.reason = Describe(node) + " left the job";
  {
    MutexLock lock(&job_.mu);
    event.generation = job_.generation;
    event.expected_workers = job_.roster.expected().workers;
    event.expected_servers = job_.roster.expected().servers;
    const JobSize present = job_.roster.Present();
    event.workers = present.workers;
    event.servers = present.servers;
  }
  job_.announcer.Tell(event);
}

void SchedulerMembership::Handle(const Message& msg) {
  const int sender = msg.meta.sender;
  const Control::Command command = msg.meta.control.cmd;
  bool may = false;
  {
    MutexLock lock(&job_.mu);
    Member* const member = job_.roster.Find(sender);
    if (member == nullptr && sender != Node::kEmpty) {
      PS_PROBE(kOldGeneration);
      PS_VLOG(1) << "a message of node " << sender
                 << ", which is not of this generation of the job";
      return;
    }
    // A registering node is no member yet, so any role will do. Its claimed role is checked later.
    const Node::Role role = member == nullptr ? Node::WORKER : member->node.role;
    if (member != nullptr && member->removed) return;
    may = (member == nullptr) == (command == Control::ADD_NODE) &&
          membership::MaySend(command, role, Node::SCHEDULER, msg.meta.body);
    if (may && member != nullptr) {
      member->heard = Clock::now();
      if (policy_->HoldsBack(msg)) return;
    }
  }
  if (may && !policy_->OnHeard(sender)) return;
  if (!may) return ignored_.Add(msg, [this](int id) { return NameOf(id); });
  switch (command) {
    case Control::ADD_NODE:
      return Register(msg);
    case Control::HEARTBEAT:
      Send(job_.links, Control::HEARTBEAT, sender);
      return OnReport(sender, msg.meta.body);
    case Control::JOB_FAILED:
      return OnFailure(msg);
    case Control::MEMBERS:
      return policy_->OnWord(sender, msg.meta.body);
    case Control::LEAVE:
      return OnFarewell(sender, msg.meta.body);
    default:
      return;  // MaySend allows no other command here
  }
}

// ------------------------------------------------------------------ nodes that leave

void SchedulerMembership::OnFarewell(int node_id, const std::string& text) {
  const auto leave = membership::Parse<membership::Leave>(text);
  if (!leave) return;  // MaySend has checked the body
  const membership::Departure departure = membership::DepartureOf(*leave, job_.settings.keep);
  if (!departure.failure.empty()) {
    if (IsWorkerId(node_id) && policy_->HoldsFailure(node_id, departure.failure)) return;
    return OnGone(node_id, departure.failure);
  }
  OnLeave(node_id, departure.suspend);
}

void SchedulerMembership::OnLeave(int node_id, bool suspend) {
  Node who;
  std::vector<Node> may_go;
  bool is_over = false;
  {
    MutexLock lock(&job_.mu);
    Member* const member = job_.roster.Find(node_id);
    if (member == nullptr || member->left) return;  // the worker waits for its answer, or has it
    const std::string objection = policy_->WhyMayNotLeave(node_id);
    if (!objection.empty()) {
      lock.Unlock();
      return OnGone(node_id, objection);
    }
    member->left = true;
    member->left_at = Clock::now();
    member->left_to_suspend = suspend;
    who = member->node;
    may_go = policy_->OnLeft(member);
    is_over = policy_->IsOver();
  }
  for (const Node& node : may_go) Send(job_.links, Control::NODE_LEFT, node.id, "", {node});
  EmitProgress(MembershipEvent::kNodeLeft, who);
  if (is_over) {
    PS_PROBE(kLastLeaves);
    return EndJob();
  }
  policy_->LetGo(Clock::now());
  Wake();
}

void SchedulerMembership::Depart(const Node& worker) {
  job_.AssertHeld();
  if (departed_.empty()) tell_departed_ = Clock::now() + ToDuration(kDepartureSeconds);
  departed_.push_back(worker);
}

void SchedulerMembership::TellOfDepartures() {
  std::vector<Node> departed;
  std::vector<int> servers;
  {
    MutexLock lock(&job_.mu);
    if (departed_.empty()) return;
    departed.swap(departed_);
    servers = job_.roster.Ids(Node::SERVER);
  }
  if (departed.size() > 1) PS_PROBE(kDeparturesTogether);
  for (const int id : servers) Send(job_.links, Control::NODE_LEFT, id, "", departed);
}

void SchedulerMembership::EndJob() {
  std::vector<int> servers, late;
  bool suspended = false;
  int generation = 0;
  {
    MutexLock lock(&job_.mu);
    // The job has failed or was stopped. Stop waits for the heartbeat thread, which sees the state.
    if (job_.state != State::kActive) return PS_PROBE(kEndedAlready);
    suspended = job_.roster.IsBeingSuspended();
    servers = job_.roster.Ids(Node::SERVER);
    for (const auto& [id, member] : job_.roster.members()) {
      if (member.node.role == Node::WORKER && !member.left) late.push_back(id);
    }
    Clear();
    if (suspended) {
      job_.roster.Expect({});
      generation = ++job_.generation;
    } else {
      job_.state = State::kEnded;
    }
  }
  for (const int id : late) {
    Send(job_.links, Control::JOB_FAILED, id, "the job ended before this replica had joined it");
  }
  const std::string end = membership::Pack(membership::End{suspended});
  for (const int id : servers) Send(job_.links, Control::JOB_END, id, end);
  if (suspended) SetGeneration(generation);
  MembershipEvent event;
  event.kind = MembershipEvent::kEnded;
  event.suspended = suspended;
  job_.announcer.Tell(event);
}

// ------------------------------------------------------------------ nodes that are lost

void SchedulerMembership::OnDisconnect(int node_id) { OnLost(node_id, "its connection closed"); }

void SchedulerMembership::OnLinkLost(int node_id, const std::string& how, bool /*closed*/) {
  OnLost(node_id, how);
}

void SchedulerMembership::OnLost(int node_id, const std::string& how) {
  OnGone(node_id, "was lost: " + how, StoodStill(Name(), job_.settings.peer_timeout_s));
}

void SchedulerMembership::OnGone(int node_id, const std::string& what, const std::string& before) {
  std::string reason;
  bool in_job = false;
  {
    MutexLock lock(&job_.mu);
    const Member* const member = job_.roster.Find(node_id);
    if (job_.state != State::kActive || member == nullptr || (member->left && !member->lingers)) {
      return PS_PROBE(kGoneAlready);
    }
    if (policy_->IsExcused(node_id)) {
      lock.Unlock();
      return job_.links->Disconnect(node_id);
    }
    reason = before + Describe(member->node) + " " + what + policy_->AlsoFailed(node_id);
    in_job = job_.any_worker;
    if (!in_job) job_.roster.Erase(node_id);
  }
  if (in_job) {
    if (!policy_->Lose(node_id, reason) && !policy_->LoseLeaver(node_id)) FailJob(reason);
    return;
  }
  PS_PROBE(kForgotten);
  BPS_LOG(WARNING) << reason << "; no worker has come yet, so another server may take its place";
  // The scheduler forgets this server. If the server lives after all, it must learn that it was
  // removed, and not wait for the job.
  Send(job_.links, Control::JOB_FAILED, node_id, reason);
  job_.links->Disconnect(node_id);
}

void SchedulerMembership::OnFailure(const Message& msg) {
  int id = msg.meta.sender;
  const auto& nodes = msg.meta.control.node;
  if (nodes.size() == 1) {
    if (policy_->Judge(id, nodes[0], msg.meta.body)) return;
    if (nodes[0].role == Node::WORKER) id = nodes[0].id;
  }
  if (!policy_->Lose(id, msg.meta.body)) FailJob(msg.meta.body);
}

void SchedulerMembership::FailJob(const std::string& reason, bool for_good, const char* file,
                                  int line) {
  std::vector<int> receivers;
  const bool goes_on = job_.settings.keep && !for_good;
  int next = 0;
  {
    MutexLock lock(&job_.mu);
    if (job_.state != State::kActive) return;
    // The state is set before nodes are told of the failure: they will end because of it, and their
    // ends must not count as further losses.
    job_.state = goes_on ? State::kTurning : State::kFailed;
    failure_ = reason;
    if (goes_on) next = job_.generation + 1;
    receivers = job_.roster.PresentIds();
  }
  Wake();
  for (const int id : receivers) Send(job_.links, Control::JOB_FAILED, id, reason);
  policy_->OnJobFailed();
  job_.announcer.TellFailure(reason, next, file, line);
  if (goes_on) BeginGeneration();
}

void SchedulerMembership::BeginGeneration() {
  PS_PROBE(kGenerationEnds);
  std::vector<Node> old;
  int generation = 0;
  {
    MutexLock lock(&job_.mu);
    if (job_.state != State::kTurning) return;  // Stop was called
    for (const auto& [id, member] : job_.roster.members()) {
      old.push_back(member.node);
      old.back().id = kRefusedBase + refused_++;
    }
    Clear();
    job_.roster.Expect({-1, job_.roster.expected().servers});
    generation = ++job_.generation;
    generation_begun_ = Clock::now();
  }
  ignored_.Clear();
  SetGeneration(generation);
  // Old nodes lose their ids first, because new nodes may get these ids while old nodes are being
  // told.
  for (const Node& node : old) {
    job_.links->Connect(node);
    job_.links->Disconnect(node.id);
  }
  {
    MutexLock lock(&job_.mu);
    if (job_.state == State::kTurning) job_.state = State::kActive;
  }
  Wake();
}

void SchedulerMembership::Clear() {
  job_.roster.Clear();
  job_.any_worker = job_.has_begun = false;
  departed_.clear();
  policy_->Clear();
}

// ------------------------------------------------------------------ heartbeats

void SchedulerMembership::OnReport(int node_id, const std::string& report) {
  if (report.empty() || report.size() > kMaxReport) return;
  {
    MutexLock lock(&job_.mu);
    if (job_.roster.Find(node_id) == nullptr) return;
  }
  MembershipEvent event;
  event.kind = MembershipEvent::kReported;
  event.node.id = node_id;
  event.report = report;
  job_.announcer.Tell(event);
}

std::optional<AwakeClock::time_point> SchedulerMembership::NextDue() {
  MutexLock lock(&job_.mu);
  if (job_.state != State::kActive) return std::nullopt;
  const auto due = departed_.empty() ? Clock::time_point::max() : tell_departed_;
  return std::min(due, policy_->NextDue());
}

void SchedulerMembership::OnBeat(Clock::time_point now) {
  CheckInvariants();
  CheckPeers(now);
  policy_->OnBeat(now);
}

void SchedulerMembership::CheckInvariants() {
  const InvariantReport broken = BrokenInvariants();
  if (broken.count == broken_invariants_) return;
  broken_invariants_ = broken.count;  // the next generation may continue
  FailJob(Describe(job_.links->self()) + " cannot go on: " + broken.last);
}

void SchedulerMembership::CheckPeers(Clock::time_point now) {
  std::vector<int> silent;
  std::string reason;
  std::string last_reason;
  {
    MutexLock lock(&job_.mu);
    for (const auto& [id, member] : job_.roster.members()) {
      const bool heard = now - member.heard < ToDuration(job_.settings.peer_timeout_s);
      if ((!member.left || member.lingers) && !heard) silent.push_back(id);
    }
    last_reason = ReasonToGiveUp(now);
    reason = ReasonNotToStart(now);
  }
  for (const int id : silent) {
    OnLost(id, "no heartbeat for " + Limit(job_.settings.peer_timeout_s, "BYTEPS_PEER_TIMEOUT_S"));
  }
  if (!reason.empty()) FailJob(reason);
  if (!last_reason.empty()) FailJob(last_reason, true);
}

std::string SchedulerMembership::ReasonNotToStart(Clock::time_point now) {
  if (!job_.any_worker || job_.has_begun ||
      now - job_.last_arrival <= ToDuration(job_.settings.start_timeout_s))
    return "";
  const std::string missing = job_.roster.Missing();
  if (missing.empty()) return "";
  PS_PROBE(kDidNotStart);
  return "the job did not start: only " + std::to_string(job_.roster.Count(Node::WORKER)) + " of " +
         Plural(job_.roster.expected().workers, "worker") + " and " +
         std::to_string(job_.roster.Count(Node::SERVER)) + " of " +
         Plural(job_.roster.expected().servers, "server") + " registered with " + Name() +
         ", and nobody else within " +
         Limit(job_.settings.start_timeout_s, "BYTEPS_START_TIMEOUT_S") + "; missing: " + missing;
}

std::string SchedulerMembership::ReasonToGiveUp(Clock::time_point now) {
  const double limit = job_.settings.keep_timeout_s;
  if (!job_.settings.keep || limit <= 0 || job_.any_worker || failure_.empty()) return "";
  if (now - generation_begun_ < ToDuration(limit)) return "";
  return "no worker came within " + Limit(limit, "BYTEPS_KEEP_TIMEOUT_S") + " after generation " +
         std::to_string(job_.generation - 1) + " of the job failed: " + failure_;
}

JobView SchedulerMembership::View() {
  const auto now = Clock::now();
  JobView view;
  MutexLock lock(&job_.mu);
  view.generation = job_.generation;
  const bool of_last = job_.state == State::kActive && !failure_.empty();
  view.failure = (of_last ? "the last generation failed: " : "") + failure_;
  view.replicas = policy_->Replicas();
  view.workers = job_.roster.expected().workers;
  view.servers = job_.roster.expected().servers;
  for (const auto& [id, member] : job_.roster.members()) {
    JobView::Peer peer;
    peer.node = InfoOf(member.node);
    peer.silent_s = std::chrono::duration<double>(now - member.heard).count();
    peer.left = member.left;
    view.peers.push_back(peer);
  }
  if (job_.state == State::kFailed) {
    view.phase = JobView::kFailed;
  } else if (job_.state == State::kEnded) {
    view.phase = JobView::kEnded;
  } else {
    view.phase = job_.roster.IsComplete() ? JobView::kRunning : JobView::kGathering;
    if (view.phase == JobView::kGathering) view.missing = job_.roster.Missing();
  }
  return view;
}

}  // namespace ps
