#include "byteps/net/membership/node_membership.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/membership/membership.h"
#include "byteps/net/membership/membership_links.h"
#include "byteps/net/membership/membership_settings.h"
#include "ps/internal/postoffice.h"

namespace ps {

using membership::NameOfScheduler;
using membership::Send;

namespace {

constexpr double kGoodbyeSeconds = 5.0;
// Time for the scheduler's last message to arrive after the scheduler's connection closed, or after
// a peer's connection broke.
constexpr double kLastWordSeconds = 0.5;
// Time for the last message of a peer to arrive after the peer closed its connection.
constexpr double kPeersWordSeconds = 1.5;
// Time for the scheduler to fail the job after this node has reported a broken link.
constexpr double kVerdictSeconds = 5.0;

}  // namespace

NodeMembership::NodeMembership(MembershipLinks* links, const MembershipSettings& settings,
                               Listener listener)
    : links_(links),
      settings_(settings),
      broken_invariants_(NumBrokenInvariants()),
      announcer_(std::move(listener)),
      heartbeats_(HeartbeatSeconds(settings.peer_timeout_s),
                  {[this] { return NextDue(); }, [this](Clock::time_point now) { OnDue(now); },
                   [this](Clock::time_point now) { OnBeat(now); }}) {}

NodeMembership::~NodeMembership() { Stop(); }

membership::Claim NodeMembership::MakeClaim(const Node& self) {
  membership::Claim claim;
  claim.protocol = membership::kProtocol;
  claim.probe = settings_.probe;
  claim.backups = settings_.backups;
  claim.workers = settings_.workers;
  claim.servers = settings_.servers;
  if (settings_.rejoin || (settings_.keep && self.role == Node::SERVER)) claim.workers = -1;
  if (settings_.rejoin) claim.servers = -1;
  if (self.role == Node::WORKER) {
    claim.replicas = settings_.replicas;
    claim.link_mbps = settings_.link_mbps > 0 ? settings_.link_mbps : links_->host_mbps();
  }
  return claim;
}

void NodeMembership::Join() {
  {
    MutexLock lock(&mu_);
    scheduler_heard_ = Clock::now();
  }
  Node self = links_->self();
  self.aux_id = self.role == Node::WORKER ? settings_.rank : -1;
  Send(links_, Control::ADD_NODE, kScheduler, membership::PackRegistration({MakeClaim(self), {}}),
       {self});
  heartbeats_.Start();

  const auto deadline = Clock::now() + ToDuration(settings_.start_timeout_s);
  MutexLock lock(&mu_);
  // The wait is ended by a welcome or a failure; deadline: BYTEPS_START_TIMEOUT_S.
  cond_.WaitUntil(&mu_, deadline,
                  [this]() PS_REQUIRES(mu_) { return welcomed_ || state_ != State::kJoining; });
  if (state_ == State::kJoining && !welcomed_) {
    lock.Unlock();
    const std::string why = links_->DialError();
    throw NoAnswer("the " + NameOfScheduler(*links_) + " did not answer within " +
                   Limit(settings_.start_timeout_s, "BYTEPS_START_TIMEOUT_S") +
                   (why.empty() ? "" : ": " + why));
  }
  // The scheduler has answered. From now on it gives up by itself if nodes are missing, and names
  // them; the heartbeat thread notices if the scheduler dies. The wait is ended by the scheduler's
  // message or its loss; deadline: the scheduler's, BYTEPS_START_TIMEOUT_S.
  cond_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return state_ != State::kJoining; });
  // A short job may have ended before this thread wakes.
  if (state_ != State::kFailed) return;
  if (failure_.kind == Failure::kWouldBeAdmitted) throw WouldBeAdmitted(failure_.reason);
  if (failure_.kind == Failure::kComeAgain) throw ComeAgain(failure_.reason);
  if (failure_.kind == Failure::kNoAnswer) throw NoAnswer(failure_.reason);
  if (welcomed_) throw JobFailed(failure_.reason, failure_.file, failure_.line);
  throw Error(failure_.reason, failure_.file, failure_.line);
}

void NodeMembership::Leave(const Farewell& farewell) {
  MutexLock lock(&mu_);
  if (state_ != State::kActive) return;
  const std::string text = membership::Pack(membership::Leave(farewell));
  const bool returns = settings_.scheduler_return_s > 0;
  if (returns) {
    asked_.leaves = true;
    asked_.farewell = text;
  }
  lock.Unlock();
  PS_PROBE(kSaysGoodbye);
  Tell(Control::LEAVE, text);
  lock.Lock();
  const auto is_over = [this]() PS_REQUIRES(mu_) {
    return left_acknowledged_ || state_ != State::kActive;
  };
  // The scheduler decides when this worker may leave. If a server is lost, other workers may need
  // this worker's results. A scheduler that returns must learn that this worker has left.
  if (settings_.replace_servers_s > 0 || returns) {
    // The wait is ended by the scheduler's answer, its loss, or Stop; deadline: the scheduler's, or
    // BYTEPS_SCHEDULER_RETURN_S without a scheduler.
    cond_.Wait(&mu_, is_over);
  } else {
    // The wait is ended by the scheduler's answer or Stop; deadline: kGoodbyeSeconds.
    cond_.WaitFor(&mu_, ToDuration(kGoodbyeSeconds), is_over);
  }
  if (state_ == State::kActive) state_ = State::kEnded;
}

void NodeMembership::StopByOrder(const std::string& how) {
  MutexLock lock(&mu_);
  if (state_ != State::kActive) return;
  PS_PROBE(kStoppedInJob);
  lock.Unlock();
  Tell(Control::LEAVE, membership::Pack(membership::Leave(membership::Stopped{how})));
  lock.Lock();
  // The wait is ended by the failure of the job or Stop; deadline: kGoodbyeSeconds.
  cond_.WaitFor(&mu_, ToDuration(kGoodbyeSeconds),
                [this]() PS_REQUIRES(mu_) { return state_ != State::kActive; });
}

bool NodeMembership::HasWorkers() {
  MutexLock lock(&mu_);
  return state_ == State::kActive;
}

void NodeMembership::Stop() {
  {
    MutexLock lock(&mu_);
    state_ = State::kStopped;
  }
  cond_.NotifyAll();
  heartbeats_.Stop();
}

void NodeMembership::SetReporter(std::function<std::string()> report) {
  MutexLock lock(&mu_);
  reporter_ = std::move(report);
}

int NodeMembership::link_mbps() {
  MutexLock lock(&mu_);
  return link_mbps_;
}

bool NodeMembership::is_late() {
  MutexLock lock(&mu_);
  return is_late_;
}

std::string NodeMembership::NameOf(int node_id) {
  if (node_id == kScheduler) return NameOfScheduler(*links_);
  MutexLock lock(&mu_);
  const Member* const member = roster_.Find(node_id);
  return member != nullptr ? Describe(member->node) : RoleAndRank(node_id);
}

std::string NodeMembership::HostOf(int node_id) {
  MutexLock lock(&mu_);
  const Member* const member = roster_.Find(node_id);
  return member != nullptr ? member->node.hostname : "";
}

void NodeMembership::Enter(State state) {
  state_ = state;
  cond_.NotifyAll();
  heartbeats_.Wake();
}

void NodeMembership::Fail(const std::string& reason, const char* file, int line) {
  {
    MutexLock lock(&mu_);
    if (!InJob()) return;
    if (state_ == State::kJoining) PS_PROBE(kFailedInJoin);
    failure_ = {Failure::kFinal, reason, file, line};
    Enter(State::kFailed);
  }
  announcer_.TellFailure(reason, 0, file, line);
}

void NodeMembership::EndJoin(Failure failure) {
  failure_ = std::move(failure);
  Enter(State::kFailed);
}

void NodeMembership::Handle(const Message& msg) {
  if (!MaySend(msg)) return ignored_.Add(msg, [this](int id) { return NameOf(id); });
  {
    MutexLock lock(&mu_);
    scheduler_heard_ = Clock::now();
  }
  const std::string& body = msg.meta.body;
  switch (msg.meta.control.cmd) {
    case Control::ADD_NODE:
      return OnAdmission(msg);
    case Control::WELCOME:
      return OnWelcome(msg);
    case Control::REFUSED:
      return settings_.probe > 0 ? OnProbeAnswer(body) : OnRefused(body);
    case Control::JOB_FAILED: {
      {
        // The scheduler announces failures only to members, so this node is a member.
        MutexLock lock(&mu_);
        welcomed_ = true;
      }
      return Fail(body);
    }
    case Control::NODE_LEFT:
      for (const Node& node : msg.meta.control.node) OnNodeLeft(node);
      return;
    case Control::MEMBERS:
      return OnMemberWord(msg);
    case Control::JOB_END:
      return OnEnd(membership::Parse<membership::End>(body).value_or(membership::End()).suspended);
    default:
      return OnHeartbeat();  // MaySend allows no other command here
  }
}

bool NodeMembership::MaySend(const Message& msg) {
  return msg.meta.sender == kScheduler && membership::MaySend(msg.meta.control.cmd, Node::SCHEDULER,
                                                              links_->self().role, msg.meta.body);
}

void NodeMembership::OnWelcome(const Message& msg) {
  const auto welcome = membership::Parse<membership::Welcome>(msg.meta.body);
  if (!welcome) return;
  if (msg.meta.control.node.size() == 1) links_->SetSelf(msg.meta.control.node[0]);
  if (OnReturn(welcome->scheduler_number)) return;
  // When this node connected, the scheduler may still have been in the previous generation, so the
  // generation is set again.
  links_->SetGeneration(welcome->generation);
  {
    MutexLock lock(&mu_);
    welcomed_ = true;
    cond_.NotifyAll();
  }
  MembershipEvent event;
  event.kind = MembershipEvent::kWelcomed;
  event.node = InfoOf(links_->self());
  announcer_.Tell(event);
}

void NodeMembership::OnRefused(const std::string& body) {
  const bool again = body.starts_with(membership::kAgain);
  MutexLock lock(&mu_);
  // This node's work is done, so a returned scheduler does not need this node.
  if (!again && asked_.leaves && state_ == State::kActive) return Enter(State::kEnded);
  if (!again) {
    lock.Unlock();
    return Fail(body);
  }
  if (state_ != State::kJoining) return;
  PS_PROBE(kComeAgain);
  EndJoin({Failure::kComeAgain, body.substr(strlen(membership::kAgain))});
}

void NodeMembership::OnProbeAnswer(const std::string& body) {
  MutexLock lock(&mu_);
  if (state_ != State::kJoining) return;
  if (body.starts_with(membership::kWould)) {
    EndJoin({Failure::kWouldBeAdmitted, body.substr(strlen(membership::kWould))});
  } else if (body.starts_with(membership::kAgain)) {
    EndJoin({Failure::kComeAgain, body.substr(strlen(membership::kAgain))});
  } else {
    EndJoin({Failure::kFinal, body});
  }
}

void NodeMembership::OnAdmission(const Message& msg) {
  const auto beginning = membership::Parse<membership::Beginning>(msg.meta.body);
  if (!beginning) return;
  {
    // link_mbps_ is set before connecting, because it decides how many connections a link uses.
    MutexLock lock(&mu_);
    link_mbps_ = beginning->link_mbps;
    is_late_ = beginning->late;
    for (const auto& [rank, turn] : beginning->turns) turns_[rank] = std::max(turns_[rank], turn);
  }
  for (const auto& node : msg.meta.control.node) {
    {
      // A scheduler that has returned sends nodes again.
      MutexLock lock(&mu_);
      if (state_ == State::kActive && roster_.Find(node.id) != nullptr) continue;
    }
    links_->Connect(node);
    if (node.role == Node::SCHEDULER) continue;  // only the scheduler's NICs are new
    MutexLock lock(&mu_);
    roster_.Put(node);
  }
  MutexLock lock(&mu_);
  if (state_ == State::kJoining) Enter(State::kActive);
}

void NodeMembership::OnNodeLeft(const Node& node) {
  const bool is_this_node = node.id == links_->self().id;
  bool is_news = true;
  {
    MutexLock lock(&mu_);
    if (is_this_node) {
      left_acknowledged_ = true;
      cond_.NotifyAll();
      return;
    }
    Member* const known = roster_.Find(node.id);
    is_news = known == nullptr || !known->left;
    if (is_news) roster_.Put(node)->left = true;
  }
  if (settings_.scheduler_return_s > 0) {
    SayOfReplica(membership::LeftKnown{Postoffice::IDtoRank(node.id)});
  }
  if (!is_news) return;
  MembershipEvent event;
  event.kind = MembershipEvent::kNodeLeft;
  event.rank = Postoffice::IDtoRank(node.id);
  event.node = InfoOf(node);
  event.reason = Describe(node) + " left the job";
  announcer_.Tell(event);
}

void NodeMembership::OnEnd(bool suspended) {
  {
    MutexLock lock(&mu_);
    if (state_ != State::kActive) return;
    Enter(State::kEnded);
  }
  MembershipEvent event;
  event.kind = MembershipEvent::kEnded;
  event.suspended = suspended;
  announcer_.Tell(event);
}

void NodeMembership::OnDisconnect(int node_id) {
  if (node_id != kScheduler) return;
  OnSchedulerLost("its connection closed",
                  "it closed the connection, as it does when its job has ended");
}

void NodeMembership::OnLinkLost(int node_id, const std::string& how, bool closed) {
  if (node_id == kScheduler) return OnSchedulerLost(how, how);
  MutexLock lock(&mu_);
  const double patience_s = closed ? kPeersWordSeconds : kLastWordSeconds;
  broken_links_.emplace(node_id, BrokenLink{how, Clock::now() + ToDuration(patience_s)});
  heartbeats_.Wake();
}

void NodeMembership::OnSchedulerLost(const std::string& how, const std::string& unwelcome) {
  MutexLock lock(&mu_);
  if (left_acknowledged_ || !InJob() || NotFound(how)) return;
  if (!welcomed_) {
    // This node never reached the scheduler, or the scheduler refused it.
    const std::string reason =
        "the " + NameOfScheduler(*links_) + " cannot be joined: " + unwelcome;
    // The job has not failed, and this process may try again.
    if (settings_.scheduler_return_s > 0) return EndJoin({Failure::kNoAnswer, reason});
    lock.Unlock();
    return Fail(reason);
  }
  // The scheduler's last message may still arrive on another connection, e.g. the end of the job or
  // a failure; wait before calling it lost.
  PS_PROBE(kLastWord);
  scheduler_loss_ = {how, Clock::now() + ToDuration(kLastWordSeconds)};
  heartbeats_.Wake();
}

std::optional<AwakeClock::time_point> NodeMembership::NextDue() {
  MutexLock lock(&mu_);
  if (!InJob()) return std::nullopt;
  auto due = Clock::time_point::max();
  if (scheduler_loss_) due = std::min(due, scheduler_loss_->due);
  if (absence_) {
    due = std::min(
        due, absence_->dials ? absence_->deadline : std::min(absence_->next, absence_->deadline));
  } else {
    for (const auto& [id, link] : broken_links_) due = std::min(due, link.due);
  }
  return due;
}

void NodeMembership::OnDue(Clock::time_point now) {
  std::optional<SchedulerLoss> loss;
  bool is_away = false;
  {
    MutexLock lock(&mu_);
    is_away = absence_.has_value();
    if (is_away) {
      scheduler_loss_.reset();
    } else if (scheduler_loss_ && now >= scheduler_loss_->due) {
      loss = scheduler_loss_;
    }
  }
  if (is_away) return LookForScheduler(now);
  if (!loss) return ReportBrokenLinks(now);
  if (AwaitScheduler(loss->how)) return;
  Fail(StoodStill(Describe(links_->self()), settings_.peer_timeout_s) + NameOfScheduler(*links_) +
       " was lost: " + loss->how);
}

void NodeMembership::ReportBrokenLinks(Clock::time_point now) {
  std::vector<int> due;
  {
    MutexLock lock(&mu_);
    for (const auto& [id, link] : broken_links_) {
      if (now >= link.due) due.push_back(id);
    }
  }
  for (const int id : due) ReportBrokenLink(id);
}

void NodeMembership::ReportBrokenLink(int id) {
  std::string reason;
  Node lost;
  bool reported = false;
  const std::string self = Describe(links_->self());
  const std::string before = StoodStill(self, settings_.peer_timeout_s);
  {
    MutexLock lock(&mu_);
    const auto it = broken_links_.find(id);
    if (it == broken_links_.end()) return;
    BrokenLink& link = it->second;
    const Member* const peer = roster_.Find(id);
    if (peer != nullptr) lost = peer->node;
    lost.id = id;
    lost.role = IsWorkerId(id) ? Node::WORKER : Node::SERVER;
    if (lost.port == Node::kEmpty) lost.port = 0;  // kEmpty is the port of nodes that do not listen
    if (peer != nullptr && peer->left) {
      PS_PROBE(kLinkOfLeaver);
      broken_links_.erase(it);  // the node left in order
      return;
    }
    reason = before + (peer != nullptr ? Describe(peer->node) : RoleAndRank(id)) + " was lost to " +
             self + ": " + link.how;
    reported = std::exchange(link.reported, true);
    // A returned scheduler may wait for other nodes before it decides.
    link.due = std::max(Clock::now(), settled_) + ToDuration(kVerdictSeconds);
  }
  if (reported) return Fail(reason);
  PS_PROBE(kLinkReported);
  Tell(Control::JOB_FAILED, reason, {lost});
}

void NodeMembership::OnBeat(Clock::time_point now) {
  CheckInvariants();
  bool silent = false;
  std::function<std::string()> reporter;
  {
    MutexLock lock(&mu_);
    if (!welcomed_ || absence_) return;  // Join has its own deadline
    silent = now - scheduler_heard_ > ToDuration(settings_.peer_timeout_s);
    reporter = reporter_;
  }
  if (silent) {
    const std::string limit = Limit(settings_.peer_timeout_s, "BYTEPS_PEER_TIMEOUT_S");
    if (AwaitScheduler("no heartbeat for " + limit)) return;
    Fail(StoodStill(Describe(links_->self()), settings_.peer_timeout_s) + NameOfScheduler(*links_) +
         " was lost: no heartbeat for " + limit);
    return;
  }
  std::string report = reporter ? reporter() : "";
  if (report.size() > kMaxReport) report.clear();
  {
    MutexLock lock(&mu_);
    if (!asked_.marked) asked_.marked = asked_.words.size();
  }
  Tell(Control::HEARTBEAT, report);
}

void NodeMembership::CheckInvariants() {
  const InvariantReport broken = BrokenInvariants();
  if (broken.count == broken_invariants_) return;
  Tell(Control::JOB_FAILED, Describe(links_->self()) + " cannot go on: " + broken.last);
}

}  // namespace ps
