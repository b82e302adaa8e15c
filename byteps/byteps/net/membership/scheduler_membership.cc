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

// Workers that leave within so long are told of by one message to each server.
constexpr double kDepartureSeconds = 0.02;

}  // namespace

SchedulerMembership::SchedulerMembership(MembershipLinks* links, const MembershipSettings& settings,
                                         Listener listener)
    : links_(links),
      settings_(settings),
      announcer_(std::move(listener)),
      broken_invariants_(NumBrokenInvariants()),
      roster_(JobSize{settings.keep ? -1 : settings.workers, settings.servers}),
      heartbeats_(HeartbeatSeconds(settings.peer_timeout_s),
                  {[this] { return NextDue(); },
                   [this](Clock::time_point now) {
                     TellOfDepartures();
                     Condemn(now);
                     DecideHeld(now);
                   },
                   [this](Clock::time_point now) { OnBeat(now); }}) {
  SetIncarnation(1);
}

SchedulerMembership::~SchedulerMembership() { Stop(); }

void SchedulerMembership::Join() { heartbeats_.Start(); }

void SchedulerMembership::StopByOrder(const std::string& how) {
  FailJob(Name() + " was " + how, true);
}

bool SchedulerMembership::HasWorkers() {
  MutexLock lock(&mu_);
  const bool has_begun = replicas_.count() > 0 || takeover_.gathers;
  return state_ == State::kActive && has_begun &&
         (takeover_.gathers || roster_.Present().workers > 0);
}

void SchedulerMembership::Stop() {
  {
    MutexLock lock(&mu_);
    state_ = State::kStopped;
  }
  heartbeats_.Stop();
}

std::string SchedulerMembership::NameOf(int node_id) {
  if (node_id == kScheduler) return membership::NameOfScheduler(*links_);
  MutexLock lock(&mu_);
  const Member* const member = roster_.Find(node_id);
  return member != nullptr ? Describe(member->node) : RoleAndRank(node_id);
}

void SchedulerMembership::SetIncarnation(int incarnation) {
  BPS_INVARIANT_NOTED("generations only grow", incarnation > last_incarnation_,
                      std::to_string(incarnation) + " after " + std::to_string(last_incarnation_));
  last_incarnation_ = incarnation;
  links_->SetIncarnation(incarnation);
}

void SchedulerMembership::EmitProgress(MembershipEvent::Kind kind, const Node& node) {
  MembershipEvent event;
  event.kind = kind;
  event.node = InfoOf(node);
  event.rank = Postoffice::IDtoRank(node.id);
  event.reason = Describe(node) + " left the job";
  {
    MutexLock lock(&mu_);
    event.incarnation = incarnation_;
    event.expected_workers = roster_.expected().workers;
    event.expected_servers = roster_.expected().servers;
    const JobSize present = roster_.Present();
    event.workers = present.workers;
    event.servers = present.servers;
  }
  announcer_.Tell(event);
}

void SchedulerMembership::Handle(const Message& msg) {
  const int sender = msg.meta.sender;
  const Control::Command command = msg.meta.control.cmd;
  bool may = false;
  {
    MutexLock lock(&mu_);
    Member* const member = roster_.Find(sender);
    if (member == nullptr && sender != Node::kEmpty) {
      PS_PROBE(kOldIncarnation);
      PS_VLOG(1) << "a message of node " << sender
                 << ", which is not of this generation of the job";
      return;
    }
    // A member has nothing to register, and one that registers is no member yet: the role that it
    // claims is looked at then.
    const Node::Role role = member == nullptr ? Node::WORKER : member->node.role;
    if (member != nullptr && member->removed) return;
    may = (member == nullptr) == (command == Control::ADD_NODE) &&
          membership::MaySend(command, role, Node::SCHEDULER, msg.meta.body);
    if (may && member != nullptr) {
      member->heard = Clock::now();
      if (HoldBack(msg)) return;
    }
  }
  if (may && !Acquit(sender)) return;
  if (!may) return ignored_.Add(msg, [this](int id) { return NameOf(id); });
  switch (command) {
    case Control::ADD_NODE:
      return Register(msg);
    case Control::HEARTBEAT:
      Send(links_, Control::HEARTBEAT, sender);
      return OnReport(sender, msg.meta.body);
    case Control::JOB_FAILED:
      return OnFailure(msg);
    case Control::MEMBERS:
      return OnMemberWord(sender, msg.meta.body);
    case Control::LEAVE:
      return OnFarewell(sender, msg.meta.body);
    default:
      return;  // MaySend knows no other
  }
}

// ------------------------------------------------------------------ nodes that leave

void SchedulerMembership::OnFarewell(int node_id, const std::string& text) {
  const membership::Departure departure = membership::ParseFarewell(text, settings_.keep);
  if (!departure.failure.empty()) {
    if (IsWorkerId(node_id) && HoldFailure(node_id, departure.failure)) return;
    return OnGone(node_id, departure.failure);
  }
  OnLeave(node_id, departure.suspend);
}

void SchedulerMembership::OnLeave(int node_id, bool suspend) {
  Node who;
  std::vector<Node> may_go;
  bool is_over = false;
  {
    MutexLock lock(&mu_);
    Member* const member = roster_.Find(node_id);
    if (member == nullptr || member->left) return;  // it waits for its answer, or has it
    const int rank = Postoffice::IDtoRank(node_id);
    if (replicas_.active() && replicas_.IsComing(replicas_.Of(rank))) {
      lock.Unlock();
      return OnGone(node_id, "left before its replica had joined");
    }
    member->left = true;
    member->lingers = settings_.replace_servers_s > 0;
    member->left_at = Clock::now();
    member->left_to_suspend = suspend;
    who = member->node;
    const bool asks = settings_.scheduler_return_s > 0;
    const bool all_left = HaveAllLeft();  // nobody needs those any more that stayed for others
    for (const auto& [id, other] : roster_.members()) {
      const bool goes = id == node_id ? all_left || !other.lingers : all_left && other.lingers;
      if (goes) may_go.push_back(other.node);
    }
    for (const Node& node : may_go) {
      roster_.Find(node.id)->lingers = false;
      asks ? AskServers(node) : Depart(node);
    }
    if (asks) may_go.clear();  // they go when servers know
    is_over = IsOver();
  }
  for (const Node& node : may_go) Send(links_, Control::NODE_LEFT, node.id, "", {node});
  EmitProgress(MembershipEvent::kNodeLeft, who);
  if (is_over) {
    PS_PROBE(kLastLeaves);
    return EndJob();
  }
  LetKnownGo();
  heartbeats_.Wake();  // its thread has something to do soon
}

void SchedulerMembership::Depart(const Node& node) {
  auto& untold = departures_.untold;
  if (untold.empty()) departures_.due = Clock::now() + ToDuration(kDepartureSeconds);
  untold.push_back(node);
}

void SchedulerMembership::TellOfDepartures() {
  std::vector<Node> departed;
  std::vector<int> servers;
  {
    MutexLock lock(&mu_);
    if (departures_.untold.empty()) return;
    departed.swap(departures_.untold);
    servers = roster_.Ids(Node::SERVER);
  }
  if (departed.size() > 1) PS_PROBE(kDeparturesTogether);
  for (const int id : servers) Send(links_, Control::NODE_LEFT, id, "", departed);
}

void SchedulerMembership::EndJob() {
  std::vector<int> servers, late;
  bool suspended = false;
  int incarnation = 0;
  {
    MutexLock lock(&mu_);
    // It has failed, or Stop was called, which waits for the heartbeats' thread: it sees the state.
    if (state_ != State::kActive) return PS_PROBE(kEndedAlready);
    suspended = roster_.IsBeingSuspended();
    servers = roster_.Ids(Node::SERVER);
    for (const auto& [id, member] : roster_.members()) {
      if (member.node.role == Node::WORKER && !member.left) late.push_back(id);
    }
    roster_.Clear();
    replicas_ = ReplicaTable();
    vacancies_.clear();
    turns_.clear();
    trials_ = {};
    departures_ = {};
    any_worker_ = false;
    if (suspended) {
      roster_.Expect({});
      incarnation = ++incarnation_;
    } else {
      state_ = State::kEnded;
    }
  }
  for (const int id : late) {
    Send(links_, Control::JOB_FAILED, id, "the job ended before this replica had joined it");
  }
  const std::string end = membership::PackEnd(suspended);
  for (const int id : servers) Send(links_, Control::JOB_END, id, end);
  if (suspended) SetIncarnation(incarnation);
  MembershipEvent event;
  event.kind = MembershipEvent::kEnded;
  event.suspended = suspended;
  announcer_.Tell(event);
}

// ------------------------------------------------------------------ nodes that are lost

void SchedulerMembership::OnDisconnect(int node_id) { OnLost(node_id, "its connection closed"); }

void SchedulerMembership::OnLinkLost(int node_id, const std::string& how, bool /*closed*/) {
  OnLost(node_id, how);
}

void SchedulerMembership::OnLost(int node_id, const std::string& how) {
  OnGone(node_id, "was lost: " + how, StoodStill(Name(), settings_.peer_timeout_s));
}

void SchedulerMembership::OnGone(int node_id, const std::string& what, const std::string& before) {
  std::string reason;
  bool in_job = false;
  {
    MutexLock lock(&mu_);
    const Member* const member = roster_.Find(node_id);
    if (state_ != State::kActive || member == nullptr || (member->left && !member->lingers)) {
      return PS_PROBE(kGoneAlready);
    }
    if (takeover_.gathers) {  // it may come again
      takeover_.accounts.Forget(node_id);
      roster_.Erase(node_id);
      lock.Unlock();
      return links_->Disconnect(node_id);
    }
    if (trials_.held && trials_.held->failed.count(node_id) > 0) return;  // it has said so itself
    reason = before + Describe(member->node) + " " + what + ThenFailed(node_id);
    in_job = any_worker_;
    if (!in_job) roster_.Erase(node_id);
  }
  if (in_job) {
    if (LoseReplica(node_id, reason) || LoseServer(node_id, reason) || LoseLeaver(node_id)) return;
    FailJob(reason);
    return;
  }
  PS_PROBE(kForgotten);
  BPS_LOG(WARNING) << reason << "; no worker has come yet, so another server may take its place";
  // Should it be there after all, it must not wait for a job that does without it.
  Send(links_, Control::JOB_FAILED, node_id, reason);
  links_->Disconnect(node_id);
}

void SchedulerMembership::OnFailure(const Message& msg) {
  int id = msg.meta.sender;
  const auto& nodes = msg.meta.control.node;
  if (nodes.size() == 1 && nodes[0].role == Node::SERVER) {
    if (AccuseServer(id, nodes[0], msg.meta.body)) return;
  } else if (nodes.size() == 1 && nodes[0].role == Node::WORKER) {
    if (AccuseWorker(id, nodes[0].id, msg.meta.body)) return;
    id = nodes[0].id;
  }
  if (!LoseReplica(id, msg.meta.body) && !LoseServer(id, msg.meta.body)) FailJob(msg.meta.body);
}

void SchedulerMembership::FailJob(const std::string& reason, bool for_good, const char* file,
                                  int line) {
  std::vector<int> receivers;
  std::vector<Node> done;
  const bool goes_on = settings_.keep && !for_good;
  int next = 0;
  {
    MutexLock lock(&mu_);
    if (state_ != State::kActive) return;
    // Before anybody is told: who ends for this reason must not become another one.
    state_ = goes_on ? State::kTurning : State::kFailed;
    failure_ = reason;
    if (goes_on) next = incarnation_ + 1;
    receivers = roster_.PresentIds();
    for (const auto& [id, leaver] : departures_.asked) done.push_back(leaver.node);
  }
  heartbeats_.Wake();
  for (const int id : receivers) Send(links_, Control::JOB_FAILED, id, reason);
  for (const Node& node : done) Send(links_, Control::NODE_LEFT, node.id, "", {node});
  announcer_.TellFailure(reason, next, file, line);
  if (goes_on) BeginIncarnation();
}

void SchedulerMembership::BeginIncarnation() {
  PS_PROBE(kIncarnationEnds);
  std::vector<Node> old;
  int incarnation = 0;
  {
    MutexLock lock(&mu_);
    if (state_ != State::kTurning) return;  // Stop was called
    for (const auto& [id, member] : roster_.members()) {
      old.push_back(member.node);
      old.back().id = kRefusedBase + refused_++;
    }
    roster_.Clear();
    roster_.Expect({-1, roster_.expected().servers});
    departures_ = {};
    replicas_ = ReplicaTable();
    vacancies_.clear();
    turns_.clear();
    trials_ = {};
    any_worker_ = false;
    incarnation = ++incarnation_;
    incarnation_begun_ = Clock::now();
  }
  ignored_.Clear();
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
  heartbeats_.Wake();
}

// ------------------------------------------------------------------ heartbeats

void SchedulerMembership::OnReport(int node_id, const std::string& report) {
  if (report.empty() || report.size() > kMaxReport) return;
  {
    MutexLock lock(&mu_);
    if (roster_.Find(node_id) == nullptr) return;
  }
  MembershipEvent event;
  event.kind = MembershipEvent::kReported;
  event.node.id = node_id;
  event.report = report;
  announcer_.Tell(event);
}

std::optional<AwakeClock::time_point> SchedulerMembership::NextDue() {
  MutexLock lock(&mu_);
  if (state_ != State::kActive) return std::nullopt;
  auto due = departures_.untold.empty() ? Clock::time_point::max() : departures_.due;
  for (const auto& [server, accusation] : trials_.accusations) due = std::min(due, accusation.due);
  if (trials_.held) due = std::min(due, trials_.held->due);
  return due;
}

void SchedulerMembership::OnBeat(Clock::time_point now) {
  CheckInvariants();
  CheckPeers(now);
}

void SchedulerMembership::CheckInvariants() {
  const InvariantReport broken = BrokenInvariants();
  if (broken.count == broken_invariants_) return;
  broken_invariants_ = broken.count;  // the next generation may go on
  FailJob(Describe(links_->self()) + " cannot go on: " + broken.last);
}

void SchedulerMembership::CheckPeers(Clock::time_point now) {
  std::vector<int> silent;
  std::string reason;
  std::string last_reason;
  bool late = false;  // others than those that came back will not
  {
    MutexLock lock(&mu_);
    late = takeover_.gathers && now - takeover_.since > ToDuration(settings_.scheduler_return_s);
    for (const auto& [id, member] : roster_.members()) {
      const bool heard = now - member.heard < ToDuration(settings_.peer_timeout_s);
      if ((!member.left || member.lingers) && !heard) silent.push_back(id);
    }
    last_reason = ReasonToGiveUp(now);
    reason = vacancies_.empty() ? ReasonNotToStart(now) : ReasonNotToReplace(now);
  }
  for (const int id : silent) {
    OnLost(id, "no heartbeat for " + Limit(settings_.peer_timeout_s, "BYTEPS_PEER_TIMEOUT_S"));
  }
  if (!reason.empty()) FailJob(reason);
  if (!last_reason.empty()) FailJob(last_reason, true);
  CheckComing(now);
  LetGo(now);
  if (late) GoOn(true);
}

std::string SchedulerMembership::ReasonNotToStart(Clock::time_point now) {
  if (!any_worker_ || now - last_arrival_ <= ToDuration(settings_.start_timeout_s)) return "";
  const std::string missing = roster_.Missing();
  if (missing.empty()) return "";
  PS_PROBE(kDidNotStart);
  return "the job did not start: only " + std::to_string(roster_.Count(Node::WORKER)) + " of " +
         Plural(roster_.expected().workers, "worker") + " and " +
         std::to_string(roster_.Count(Node::SERVER)) + " of " +
         Plural(roster_.expected().servers, "server") + " registered with " + Name() +
         ", and nobody else within " + Limit(settings_.start_timeout_s, "BYTEPS_START_TIMEOUT_S") +
         "; missing: " + missing;
}

std::string SchedulerMembership::ReasonToGiveUp(Clock::time_point now) {
  const double limit = settings_.keep_timeout_s;
  if (!settings_.keep || limit <= 0 || any_worker_ || failure_.empty()) return "";
  if (now - incarnation_begun_ < ToDuration(limit)) return "";
  return "no worker came within " + Limit(limit, "BYTEPS_KEEP_TIMEOUT_S") + " after generation " +
         std::to_string(incarnation_ - 1) + " of the job failed: " + failure_;
}

JobView SchedulerMembership::View() {
  const auto now = Clock::now();
  JobView view;
  MutexLock lock(&mu_);
  view.incarnation = incarnation_;
  const bool of_last = state_ == State::kActive && !failure_.empty();
  view.failure = (of_last ? "the last generation failed: " : "") + failure_;
  if (replicas_.active()) view.replicas = replicas_.View(false);
  view.workers = roster_.expected().workers;
  view.servers = roster_.expected().servers;
  for (const auto& [id, member] : roster_.members()) {
    JobView::Peer peer;
    peer.node = InfoOf(member.node);
    peer.silent_s = std::chrono::duration<double>(now - member.heard).count();
    peer.left = member.left;
    view.peers.push_back(peer);
  }
  if (state_ == State::kFailed) {
    view.phase = JobView::kFailed;
  } else if (state_ == State::kEnded) {
    view.phase = JobView::kEnded;
  } else {
    view.phase = roster_.IsComplete() ? JobView::kRunning : JobView::kGathering;
    if (view.phase == JobView::kGathering) view.missing = roster_.Missing();
  }
  return view;
}

}  // namespace ps
