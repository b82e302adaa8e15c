#include "byteps/net/membership/membership.h"

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/mutex.h"
#include "byteps/base/probe.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/link/node_text.h"
#include "byteps/net/membership/commands.h"
#include "byteps/net/membership/protocol.h"
#include "dmlc/logging.h"
#include "ps/internal/postoffice.h"

namespace ps {

using membership::kLastWordSeconds;

namespace {

constexpr double kGoodbyeSeconds = 5.0;
// Of each role.  A job that claims to have more is not believed: the scheduler would count them.
constexpr int kMaxNodes = 1 << 20;
// Of nine digits, as messages have it.
constexpr double kMostMbps = 999'999'999;
// How the LEAVE of a worker begins that will come back, and of one whose process fails.
constexpr char kSuspend[] = "suspend";
constexpr char kWithFailure[] = "failed: ";
// In the LEAVE of a worker in which an operation failed, before what failed.
constexpr char kAfter[] = " after: ";

bool BeginsWith(const std::string& text, const std::string& prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}

double Number(const char* name, double fallback) {
  const char* text = Environment::Get()->find(name);
  return text == nullptr ? fallback : atof(text);
}

}  // namespace

double HeartbeatSeconds(double peer_timeout_s) {
  return std::min(std::max(peer_timeout_s / 6, 0.05), 5.0);
}

MembershipSettings MembershipSettings::FromEnvironment() {
  MembershipSettings settings;
  settings.is_scheduler = std::string(GetEnv("DMLC_ROLE", "")) == "scheduler";
  settings.peer_timeout_s = Number("BYTEPS_PEER_TIMEOUT_S", settings.peer_timeout_s);
  settings.start_timeout_s = Number("BYTEPS_START_TIMEOUT_S", settings.start_timeout_s);
  settings.workers = GetEnv("DMLC_NUM_WORKER", -1);
  settings.servers = GetEnv("DMLC_NUM_SERVER", -1);
  settings.rank = GetEnv("DMLC_WORKER_ID", -1);
  settings.rejoin = GetEnv("BYTEPS_REJOIN", 0) != 0;
  settings.link_mbps = static_cast<int>(std::min(Number("BYTEPS_LINK_GBPS", 0) * 1000, kMostMbps));
  settings.probe = GetEnv("BYTEPS_PROBE", 0);
  settings.keep = GetEnv("BYTEPS_KEEP", 0) != 0;
  settings.keep_timeout_s = Number("BYTEPS_KEEP_TIMEOUT_S", settings.keep_timeout_s);
  return settings;
}

Membership::Membership(MembershipLinks* links, const MembershipSettings& settings,
                       Listener listener)
    : links_(links),
      settings_(settings),
      listener_(std::move(listener)),
      expected_workers_(settings.is_scheduler && settings.keep ? -1 : settings.workers),
      expected_servers_(settings.servers),
      broken_invariants_(NumBrokenInvariants()) {
  if (!settings.is_scheduler) return;
  // A node may come as soon as the links listen, which is before Join.
  state_ = State::kActive;
  SetIncarnation(incarnation_);
}

Membership::~Membership() { Stop(); }

void Membership::Stop() {
  {
    MutexLock lock(&mu_);
    state_ = State::kStopped;
  }
  cond_.NotifyAll();
  if (timer_.joinable()) timer_.join();
}

std::string Membership::PackClaim(const Claim& claim) {
  std::ostringstream text;
  text << "protocol=" << claim.protocol << " workers=" << claim.workers
       << " servers=" << claim.servers << " link=" << claim.link_mbps << " probe=" << claim.probe;
  return text.str();
}

bool Membership::ParseClaim(const std::string& text, Claim* claim) {
  // So many digits fit into an int, whatever comes.
  const int found =
      sscanf(text.c_str(), "protocol=%9d workers=%9d servers=%9d link=%9d probe=%9d",
             &claim->protocol, &claim->workers, &claim->servers, &claim->link_mbps, &claim->probe);
  return found == 5 && claim->link_mbps >= 0 && claim->workers <= kMaxNodes &&
         claim->servers <= kMaxNodes && claim->probe >= 0 && claim->probe <= kMaxNodes;
}

void Membership::Send(Control::Command command, int recver, const std::string& body,
                      const std::vector<Node>& nodes) {
  Message msg;
  msg.meta.recver = recver;
  msg.meta.control.cmd = command;
  msg.meta.control.node = nodes;
  msg.meta.body = body;
  links_->Send(&msg);
}

void Membership::SetIncarnation(int incarnation) {
  PS_INVARIANT_NOTED("incarnation numbers only grow", incarnation > last_incarnation_,
                     std::to_string(incarnation) + " after " + std::to_string(last_incarnation_));
  last_incarnation_ = incarnation;
  links_->SetIncarnation(incarnation);
}

void Membership::Emit(const MembershipEvent& event) {
  const bool is_end = (event.kind == MembershipEvent::kFailed && event.next_incarnation == 0) ||
                      (event.kind == MembershipEvent::kEnded && !event.suspended);
  PS_INVARIANT_NOTED("a job ends once", !is_end || !over_.exchange(true), event.reason);
  if (listener_) listener_(event);
}

void Membership::Fail(const std::string& reason, const char* file, int line) {
  {
    MutexLock lock(&mu_);
    if (state_ != State::kJoining && state_ != State::kActive) return;
    if (state_ == State::kJoining) PS_PROBE(kFailedInJoin);
    state_ = State::kFailed;
    failure_ = reason;
    failure_file_ = file;
    failure_line_ = line;
  }
  cond_.NotifyAll();
  EmitFailure(reason, 0, file, line);
}

void Membership::EmitFailure(const std::string& reason, int next_incarnation, const char* file,
                             int line) {
  MembershipEvent event;
  event.kind = MembershipEvent::kFailed;
  event.next_incarnation = next_incarnation;
  event.reason = reason;
  event.file = file;
  event.line = line;
  Emit(event);
}

std::string Membership::SchedulerName() const {
  return "scheduler (" + JoinHostPort(links_->scheduler().hostname, links_->scheduler().port) + ")";
}

std::string Membership::StoodStill() const {
  const auto limit = ToDuration(settings_.peer_timeout_s);
  const auto pause = StallWatch::Get()->StoodStill(limit, std::chrono::steady_clock::now());
  // A shorter one is no reason to be taken for lost.
  if (pause < limit / 3) return "";
  char text[64];
  snprintf(text, sizeof(text), " stood still for %.1f s; ",
           std::chrono::duration<double>(pause).count());
  return (settings_.is_scheduler ? "the " + SchedulerName() : Describe(links_->self())) + text;
}

std::string Membership::NameOf(int node_id) {
  MutexLock lock(&mu_);
  if (node_id == kScheduler) return SchedulerName();
  auto it = peers_.find(node_id);
  if (it != peers_.end()) return Describe(it->second.node);
  return RoleAndRank(node_id);
}

void Membership::Join() {
  Claim claim;
  claim.protocol = membership::kProtocol;
  claim.probe = settings_.probe;
  {
    MutexLock lock(&mu_);
    scheduler_heard_ = Clock::now();
    claim.workers = expected_workers_;
    claim.servers = expected_servers_;
  }
  if (!settings_.is_scheduler) {
    Node self = links_->self();
    self.aux_id = self.role == Node::WORKER ? settings_.rank : -1;
    if (settings_.rejoin || (settings_.keep && self.role == Node::SERVER)) claim.workers = -1;
    if (settings_.rejoin) claim.servers = -1;
    if (self.role == Node::WORKER) {
      claim.link_mbps = settings_.link_mbps > 0 ? settings_.link_mbps : CardMbps(self.hostname);
    }
    Send(Control::ADD_NODE, kScheduler, PackClaim(claim), {self});
  }
  timer_ = std::thread(&Membership::TimerLoop, this);
  pthread_setname_np(timer_.native_handle(), "bps-members");
  if (settings_.is_scheduler) return;

  const auto deadline = Clock::now() + ToDuration(settings_.start_timeout_s);
  MutexLock lock(&mu_);
  cond_.WaitUntil(&mu_, deadline,
                  [this]() PS_REQUIRES(mu_) { return welcomed_ || state_ != State::kJoining; });
  if (state_ == State::kJoining && !welcomed_) {
    throw NoAnswer("the " + SchedulerName() + " did not answer within " +
                   Limit(settings_.start_timeout_s, "BYTEPS_START_TIMEOUT_S"));
  }
  // The scheduler answers; it also gives up when nodes stay away, and says who.
  // Should it vanish meanwhile, the timer thread notices.
  cond_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return state_ != State::kJoining; });
  // A short job may even have ended before this thread woke.
  if (state_ != State::kFailed) return;
  if (would_be_admitted_) throw WouldBeAdmitted(failure_);
  if (come_again_) throw ComeAgain(failure_);
  if (welcomed_) throw JobFailed(failure_, failure_file_, failure_line_);
  throw dmlc::Error(failure_, failure_file_, failure_line_);
}

void Membership::Leave(const Farewell& farewell) {
  MutexLock lock(&mu_);
  if (state_ != State::kActive) return;
  lock.Unlock();
  PS_PROBE(kSaysGoodbye);
  std::string text = farewell.suspend ? kSuspend : "finish";
  if (!farewell.error.empty()) text += kAfter + farewell.error;
  if (!farewell.failure.empty()) text = kWithFailure + farewell.failure;
  Send(Control::LEAVE, kScheduler, text);
  lock.Lock();
  cond_.WaitFor(&mu_, ToDuration(kGoodbyeSeconds), [this]() PS_REQUIRES(mu_) {
    return left_acknowledged_ || state_ != State::kActive;
  });
  if (state_ == State::kActive) state_ = State::kEnded;
}

void Membership::StopByOrder(const std::string& how) {
  if (settings_.is_scheduler) return FailJob("the " + SchedulerName() + " was " + how, true);
  MutexLock lock(&mu_);
  if (state_ != State::kActive) return;
  PS_PROBE(kStoppedInJob);
  lock.Unlock();
  Send(Control::LEAVE, kScheduler, how);
  lock.Lock();
  cond_.WaitFor(&mu_, ToDuration(kGoodbyeSeconds),
                [this]() PS_REQUIRES(mu_) { return state_ != State::kActive; });
}

void Membership::SetReporter(std::function<std::string()> report) {
  MutexLock lock(&mu_);
  reporter_ = std::move(report);
}

void Membership::Handle(const Message& msg) {
  const auto& control = msg.meta.control;
  if (settings_.is_scheduler && !IsOfThisIncarnation(msg)) return;
  if (!MayHave(msg)) return;
  {
    MutexLock lock(&mu_);
    if (!settings_.is_scheduler) {
      scheduler_heard_ = Clock::now();
    } else if (auto it = peers_.find(msg.meta.sender); it != peers_.end()) {
      it->second.heard = Clock::now();
    }
  }
  switch (control.cmd) {
    case Control::ADD_NODE:
      if (settings_.is_scheduler) {
        Register(msg);
      } else {
        OnAdmission(msg);
      }
      return;
    case Control::WELCOME: {
      if (control.node.size() == 1) links_->SetSelf(control.node[0]);
      // The scheduler's number when this node connected may have been that of the last incarnation.
      links_->SetIncarnation(atoi(msg.meta.body.c_str()));
      {
        MutexLock lock(&mu_);
        welcomed_ = true;
        cond_.NotifyAll();
      }
      MembershipEvent event;
      event.kind = MembershipEvent::kWelcomed;
      event.node = links_->self();
      Emit(event);
      return;
    }
    case Control::REFUSED:
      if (OnProbeAnswer(msg.meta.body)) return;
      if (BeginsWith(msg.meta.body, membership::kAgain)) {
        // Only Join hears of it: nothing has failed yet.
        MutexLock lock(&mu_);
        if (state_ != State::kJoining) return;
        PS_PROBE(kComeAgain);
        state_ = State::kFailed;
        failure_ = msg.meta.body.substr(strlen(membership::kAgain));
        come_again_ = true;
        cond_.NotifyAll();
        return;
      }
      [[fallthrough]];
    case Control::JOB_FAILED:
      if (settings_.is_scheduler) return FailJob(msg.meta.body);
      if (control.cmd == Control::JOB_FAILED) {
        // Only members are told, and its welcome may come later.
        MutexLock lock(&mu_);
        welcomed_ = true;
      }
      return Fail(msg.meta.body);
    case Control::HEARTBEAT:
      if (!settings_.is_scheduler) return;
      Send(Control::HEARTBEAT, msg.meta.sender);
      OnReport(msg.meta.sender, msg.meta.body);
      return;
    case Control::LEAVE:
      OnFarewell(msg.meta.sender, msg.meta.body);
      return;
    case Control::NODE_LEFT:
      for (const Node& node : control.node) OnNodeLeft(node);
      return;
    case Control::JOB_END: {
      {
        MutexLock lock(&mu_);
        if (state_ != State::kActive) return;
        state_ = State::kEnded;
        cond_.NotifyAll();
      }
      MembershipEvent event;
      event.kind = MembershipEvent::kEnded;
      event.suspended = msg.meta.body == "suspend";
      Emit(event);
      return;
    }
    default:
      return;  // MayHave knows no other
  }
}

void Membership::OnFarewell(int node_id, const std::string& text) {
  const size_t after = text.find(kAfter);
  if (BeginsWith(text, membership::kStopped)) {
    OnGone(node_id, "was " + text);
  } else if (BeginsWith(text, kWithFailure)) {
    OnGone(node_id, text);
  } else if (settings_.keep && after != std::string::npos) {
    OnGone(node_id, kWithFailure + text.substr(after + strlen(kAfter)));
  } else {
    OnLeave(node_id, BeginsWith(text, kSuspend));
  }
}

bool Membership::MayHave(const Message& msg) {
  const int sender = msg.meta.sender;
  const Control::Command command = msg.meta.control.cmd;
  const Node::Role to = links_->self().role;
  Node::Role from = Node::SCHEDULER;
  // A member has nothing to register, and one that registers is no member yet.
  bool may = settings_.is_scheduler ? (sender == Node::kEmpty) == (command == Control::ADD_NODE)
                                    : sender == kScheduler;
  {
    MutexLock lock(&mu_);
    if (settings_.is_scheduler) {
      auto it = peers_.find(sender);
      // Register looks at the role that one claims who is no member yet.
      from = it == peers_.end() ? Node::WORKER : it->second.node.role;
    }
    may = may && membership::MaySend(command, from, to, msg.meta.body);
    if (may || !warned_of_.insert(sender).second) return may;
  }
  LOG(WARNING) << "ignored " << membership::NameOf(command) << " from " << NameOf(sender)
               << ", which must not send it to this node; more of the kind from there is ignored "
                  "without a warning";
  return false;
}

void Membership::TimerLoop() {
  const double heartbeat_s = HeartbeatSeconds(settings_.peer_timeout_s);
  StallWatch::Feeder feeder(heartbeat_s);
  // By the steady clock: others wait for it, even if this process stood still.
  auto next = std::chrono::steady_clock::now() + ToDuration(heartbeat_s);
  MutexLock lock(&mu_);
  while (state_ != State::kStopped) {
    if (state_ != State::kActive && state_ != State::kJoining) {
      feeder.Rest();
      cond_.Wait(&mu_);  // nothing to watch any more
      continue;
    }
    feeder.Tick();
    const auto now = Clock::now();
    const auto until_next = next - std::chrono::steady_clock::now();
    const bool beat = until_next <= Clock::duration::zero();
    auto wake = now + until_next;
    const auto last_word = scheduler_closed_at_ + ToDuration(kLastWordSeconds);
    if (scheduler_closed_) wake = std::min(wake, last_word);
    const bool departures = !departed_.empty();
    if (departures) wake = std::min(wake, departed_due_);
    const bool broken = broken_link_ != Node::kEmpty;
    const bool verdict_due = broken && now >= broken_deadline_;
    if (broken) wake = std::min(wake, broken_deadline_);
    if (now < wake) {
      cond_.WaitUntil(&mu_, feeder.SleepUntil(wake));
      continue;
    }
    const bool lost = scheduler_closed_ && now >= last_word;
    const std::string how = scheduler_closed_how_;
    const bool tell = departures && now >= departed_due_;
    lock.Unlock();
    if (tell) TellOfDepartures();
    if (lost) {
      Fail(StoodStill() + SchedulerName() + " was lost: " + how);
    } else if (verdict_due) {
      ReportBrokenLink();
    }
    if (!beat) {
      lock.Lock();
      continue;
    }
    CheckInvariants();
    if (settings_.is_scheduler) {
      CheckPeers(now);
    } else {
      CheckScheduler(now);
    }
    lock.Lock();
    next = std::chrono::steady_clock::now() + ToDuration(heartbeat_s);
  }
}

void Membership::CheckInvariants() {
  const InvariantReport broken = BrokenInvariants();
  if (broken.count == broken_invariants_) return;
  const std::string reason = Describe(links_->self()) + " cannot go on: " + broken.last;
  if (!settings_.is_scheduler) return Send(Control::JOB_FAILED, kScheduler, reason);
  broken_invariants_ = broken.count;  // the next incarnation may go on
  FailJob(reason);
}

}  // namespace ps
