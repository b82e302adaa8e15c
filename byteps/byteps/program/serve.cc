#include "byteps/program/serve.h"

#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>

#include "byteps/base/config.h"
#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/mutex.h"
#include "byteps/base/process.h"
#include "byteps/cluster/session.h"
#include "byteps/net/link/registration_cache.h"
#include "byteps/net/membership/event.h"
#include "byteps/net/membership/heartbeat_thread.h"
#include "byteps/observe/metrics.h"
#include "byteps/observe/metrics_server.h"
#include "byteps/observe/status_board.h"
#include "byteps/observe/status_server.h"
#include "byteps/program/health_server.h"
#include "byteps/program/job_log.h"
#include "byteps/program/stop_order.h"
#include "byteps/recovery/scheduler/make_roster_recovery.h"
#include "byteps/recovery/server/server_recovery.h"
#include "byteps/server/sum_server.h"

namespace byteps {
namespace core {
namespace {

// A node counts as silent after two missed heartbeats.
constexpr double kMissedHeartbeats = 2.5;
// Pause before a server that outlived a job joins the next one. The next job may fail at once.
constexpr auto kRejoinPause = std::chrono::milliseconds(50);
// Seconds between a second signal and the end of this process. In this time it tells the other
// nodes why it ends.
constexpr unsigned kSecondSignalSeconds = 3;
// Signals within this time count as one: a service manager signals each process, and server.sh also
// forwards the signal that it gets.
constexpr int64_t kOneOrderNs = 1'000'000'000;
constexpr int64_t kLookMs = 10'000;
// Time that the end of the process waits for a slow reader of the log.
constexpr double kLastWordsSeconds = 0.5;

// Outcome of the job. Handlers set it; the main thread sleeps on `fd` until then.
struct Outcome {
  ps::Mutex mu;
  bool ended PS_GUARDED_BY(mu) = false;
  bool suspended PS_GUARDED_BY(mu) = false;
  std::string failure PS_GUARDED_BY(mu);
  // Source location at which the failure was found.
  const char* file PS_GUARDED_BY(mu) = "";
  int line PS_GUARDED_BY(mu) = 0;
};

int wake_fd = -1;
// The kernel may run the signal handler on any thread. The main thread reads these.
std::atomic<int> caught_signal{0};
std::atomic<int64_t> first_signal_ns{0};
std::atomic<bool> is_hurried{false};
static_assert(std::atomic<int64_t>::is_always_lock_free, "a handler may take no lock");

void Wake() {
  const uint64_t one = 1;
  // EAGAIN: the counter is full, so the reader is awake already.
  if (write(wake_fd, &one, sizeof(one)) < 0 && errno != EAGAIN) abort();
}

void OnSignal(int number) {
  caught_signal = number;
  const int64_t now = SteadyNs();
  int64_t first = 0;
  const bool is_first = first_signal_ns.compare_exchange_strong(first, now);
  if (!is_first && now - first >= kOneOrderNs && !is_hurried.exchange(true)) {
    // After this time the kernel ends the process, even if it hangs.
    alarm(kSecondSignalSeconds);
  }
  Wake();
}

int StatusOfSignal() {
  return 128 + (caught_signal == kParentEnded ? SIGTERM : caught_signal.load());
}

void OnAlarm(int) { _exit(StatusOfSignal()); }

void SetSignalHandlers() {
  struct sigaction action;
  memset(&action, 0, sizeof(action));
  action.sa_handler = OnSignal;
  for (const int number : {SIGINT, SIGTERM, kParentEnded}) sigaction(number, &action, nullptr);
  action.sa_handler = OnAlarm;
  sigaction(SIGALRM, &action, nullptr);
  action.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &action, nullptr);
}

const char* NameOfSignal() { return caught_signal == SIGINT ? "SIGINT" : "SIGTERM"; }

// Waits for an event, at most `limit_ms`; -1 means no limit.
void AwaitWake(int limit_ms) {
  pollfd item{wake_fd, POLLIN, 0};
  if (poll(&item, 1, limit_ms) <= 0) return;
  uint64_t count;
  if (read(wake_fd, &count, sizeof(count)) < 0 && errno != EAGAIN) abort();
}

// Ends the process at a signal while it joins a job. Joining blocks until the cluster is complete,
// and until then no other node needs this process.
class EndsWhileJoining {
 public:
  explicit EndsWhileJoining(const Parent& parent) : parent_(parent), thread_([this] { Run(); }) {}
  ~EndsWhileJoining() {
    joined_ = true;
    Wake();
    // The wait is ended by Wake above; deadline: none.
    thread_.join();
  }
  EndsWhileJoining(const EndsWhileJoining&) = delete;
  EndsWhileJoining& operator=(const EndsWhileJoining&) = delete;

 private:
  void Run() {
    NameThisThread("signals");
    while (!joined_) {
      AwaitWake(-1);
      if (caught_signal != 0) End();
    }
  }

  [[noreturn]] void End() {
    if (caught_signal == kParentEnded) parent_.EndAtOnce();
    BPS_LOG(WARNING) << "told to end by " << NameOfSignal() << " before the job was complete";
    ps::FlushLog(kLastWordsSeconds);
    signal(caught_signal, SIG_DFL);
    kill(getpid(), caught_signal);
    while (true) pause();
  }

  const Parent& parent_;
  std::atomic<bool> joined_{false};
  std::thread thread_;
};

// Writes to a temporary file and renames it at the end, so that readers see the whole file or none.
void WritePortFile(const std::string& path, const Session& session) {
  const std::string part = path + ".part";
  std::ofstream out(part);
  out << session.host() << " " << session.port() << "\n";
  out.close();
  if (!out || rename(part.c_str(), path.c_str()) != 0) {
    throw Error("cannot write --port-file " + path + ": " + strerror(errno));
  }
}

// Answers health checks of a server or scheduler. Thread-safe.
class HealthReport {
 public:
  explicit HealthReport(Role role) : role_(role) {}

  // `server`: null on the scheduler.
  void Joined(int rank, SumServer* server) {
    ps::MutexLock lock(&mu_);
    rank_ = rank;
    joined_ = true;
    server_ = server;
  }
  // Call before the server is destroyed.
  void Left() {
    ps::MutexLock lock(&mu_);
    joined_ = false;
    server_ = nullptr;
  }

  std::string Describe() {
    ps::MutexLock lock(&mu_);
    std::string text = NameOf(role_);
    if (!joined_) return text + " waits for the job to gather";
    if (role_ == Role::kServer) text += " " + std::to_string(rank_);
    text += " serves";
    if (server_ == nullptr) return text;
    // Reading these metrics takes the server's locks. So a server that hangs does not answer.
    for (const Metric& metric : server_->Metrics()) {
      if (metric.kind == Metric::kHistogram || !metric.labels.empty()) continue;
      char value[32];
      snprintf(value, sizeof(value), "%.15g", metric.value);
      text += " " + metric.name + "=" + value;
    }
    return text;
  }

 private:
  const Role role_;
  ps::Mutex mu_;
  int rank_ PS_GUARDED_BY(mu_) = -1;
  bool joined_ PS_GUARDED_BY(mu_) = false;
  SumServer* server_ PS_GUARDED_BY(mu_) = nullptr;
};

// Sleeps until the job has an outcome or a signal has come. On the scheduler, also logs missing
// nodes.
void WaitForOutcome(Role role, Outcome* outcome, Session* session, JobLog* log) {
  while (true) {
    int limit_ms = -1;
    if (role == Role::kScheduler) {
      const auto now = JobLog::Clock::now();
      const auto pause = log->Look(session->View(), now) - now;
      // Another event may make the next look due earlier.
      limit_ms = static_cast<int>(std::min<int64_t>(
          std::chrono::duration_cast<std::chrono::milliseconds>(pause).count() + 1, kLookMs));
    }
    {
      ps::MutexLock lock(&outcome->mu);
      if (outcome->ended || !outcome->failure.empty() || caught_signal != 0) return;
    }
    AwaitWake(limit_ms);
  }
}

// After the job's end, the scheduler stays until spare servers have learned of the end. These ask
// several times a second whether they may replace a lost server. If the scheduler were gone, they
// would wait for another scheduler.
void AnswerSpares(const Config& config, Outcome* outcome) {
  constexpr auto kLastAnswers = std::chrono::seconds(1);
  {
    ps::MutexLock lock(&outcome->mu);
    if (!outcome->ended) return;
  }
  const bool may_wait = config.Float("BYTEPS_REPLACE_SERVERS_S") > 0;
  if (may_wait && config.Float("BYTEPS_SCHEDULER_RETURN_S") > 0) {
    std::this_thread::sleep_for(kLastAnswers);  // ended by the time; deadline: the same
  }
}

// Handles events and messages of a scheduler or server for the main thread.
class Node : public ChannelUser {
 public:
  // `server`: null on the scheduler. `board`: null on a server.
  Node(SumServer* server, StatusBoard* board, JobLog* log, Outcome* outcome)
      : server_(server), board_(board), log_(log), outcome_(outcome) {}

  void OnMessage(Message* message) override {
    if (server_ != nullptr) server_->OnMessage(message);
  }

  char* PlaceFor(const MessageHead& head, size_t bytes) override {
    return server_ != nullptr && server_->Expects(head, bytes) ? nullptr : ps::Nowhere();
  }

  void OnEvent(const ps::MembershipEvent& event) override {
    log_->OnEvent(event);
    if (event.kind == ps::MembershipEvent::kNodeLeft && server_ != nullptr) {
      server_->OnWorkerGone(event.rank, event.reason);
      return;
    }
    if (event.kind == ps::MembershipEvent::kReplicas) {
      if (server_ != nullptr) server_->SetAbsent(event.replicas.AbsentRanks());
      return;
    }
    if (event.kind == ps::MembershipEvent::kServerLost ||
        event.kind == ps::MembershipEvent::kServerReplaced) {
      const bool is_lost = event.kind == ps::MembershipEvent::kServerLost;
      if (server_ != nullptr) {
        is_lost ? server_->OnServerLost(event.rank) : server_->OnServerReplaced(event.rank);
      }
      return;
    }
    if (event.kind == ps::MembershipEvent::kReported) {
      if (board_ != nullptr) board_->OnReport(event.node.id, event.report);
      return;
    }
    const bool is_scheduler = server_ == nullptr;
    if (event.kind == ps::MembershipEvent::kFailed && event.next_generation > 0) {
      if (board_ != nullptr) board_->OnGeneration();
      ps::WriteLogLine('W', event.file, event.line,
                       "generation " + std::to_string(event.next_generation - 1) +
                           " of the job failed: " + event.reason + "; waiting for generation " +
                           std::to_string(event.next_generation));
      return;
    }
    ps::MutexLock lock(&outcome_->mu);
    if (event.kind == ps::MembershipEvent::kFailed && outcome_->failure.empty()) {
      outcome_->failure = event.reason;
      outcome_->file = event.file;
      outcome_->line = event.line;
    }
    // After a suspended job the scheduler stays, because the workers will return.
    if (event.kind == ps::MembershipEvent::kEnded && !(is_scheduler && event.suspended)) {
      outcome_->ended = true;
      outcome_->suspended = event.suspended;
    }
    Wake();
  }

  std::string Report() override { return server_ != nullptr ? server_->Report() : ""; }

 private:
  SumServer* const server_;
  StatusBoard* const board_;
  JobLog* const log_;
  Outcome* const outcome_;
};

// StopOrder's view of a scheduler or server that stops.
class ToldToEnd : public StopOrder::Process {
 public:
  // `server`: null on the scheduler.
  ToldToEnd(SumServer* server, Session* session, Outcome* outcome)
      : server_(server), session_(session), outcome_(outcome) {}

  bool IsOver() override {
    ps::MutexLock lock(&outcome_->mu);
    return outcome_->ended || !outcome_->failure.empty();
  }
  bool HasWorkers() override { return session_->HasWorkers(); }
  bool HasOpenSums() override { return server_ != nullptr && server_->OpenRounds() > 0; }
  bool AllArrived() override { return session_->AllArrived(); }
  bool IsHurried() override { return is_hurried; }
  StopOrder::Duration Now() override { return std::chrono::steady_clock::now().time_since_epoch(); }
  // The wait is ended by the time; deadline: StopOrder's.
  void Sleep(StopOrder::Duration duration) override { std::this_thread::sleep_for(duration); }

 private:
  SumServer* const server_;
  Session* const session_;
  Outcome* const outcome_;
};

// Handles a signal to stop: waits until the workers have left. If they stay too long, it fails the
// job, so that all nodes learn the reason.
void EndByOrder(const Config& config, const Parent& parent, SumServer* server, Session* session,
                Outcome* outcome) {
  if (caught_signal == kParentEnded) {  // reductions without the parent's rank will never complete
    session->StopByOrder(parent.How());
    return;
  }
  ToldToEnd process(server, session, outcome);
  StopOrder order(&process, NameOfSignal(), config.Float("BYTEPS_STOP_TIMEOUT_S"));
  const std::string how = order.Await();
  if (!how.empty()) session->StopByOrder(how);
}

// Returns memory of the previous generation to the kernel. The C library would keep it in the
// arenas of ended threads, and new threads may use other arenas.
void ReturnMemory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

// Serves a job. Throws JobFailedError if it fails, another Error if it cannot be joined.
void ServeOnce(const Config& config, const Parent& parent, Role role, bool rejoin,
               const std::string& port_file, HealthReport* health, StatusBoard* board, JobLog* log,
               Outcome* outcome) {
  SessionOptions options;
  options.role = role;
  options.num_workers = static_cast<int>(config.Int("DMLC_NUM_WORKER"));
  options.num_servers = static_cast<int>(config.Int("DMLC_NUM_SERVER"));
  options.rejoin = rejoin;
  options.make_roster_policy = ps::MakeRosterRecovery;
  Session session(config, options);
  std::unique_ptr<SumServer> server;
  std::unique_ptr<MetricsServer> metrics_server;
  if (role == Role::kServer) {
    server = std::make_unique<SumServer>(config, &session,
                                         std::make_unique<ServerRecovery>(config, &session));
    const MetricsSource source{Role::kServer, [&server] { return server->rank(); },
                               [&server] { return server->Metrics(); }};
    const int local_rank = static_cast<int>(config.Int("BYTEPS_LOCAL_RANK"));
    metrics_server = MetricsServer::Make(config, local_rank, source);
  }
  Node node(server.get(), board, log, outcome);
  if (caught_signal != 0) return;  // the signal came after the last job, before this one
  if (rejoin) log->OnRestart();
  {
    const EndsWhileJoining until_joined(parent);
    session.Start(&node);
  }
  if (rejoin) ReturnMemory();  // the previous session's transport is gone only now
  if (server) {
    server->SetRank(session.rank());
    log->OnComplete(session.rank(), config.Bool("BYTEPS_KEEP") ? -1 : options.num_workers);
  }
  health->Joined(session.rank(), server.get());
  const struct Leaver {
    HealthReport* health;
    ~Leaver() { health->Left(); }
  } leaver{health};
  try {
    if (!port_file.empty()) WritePortFile(port_file, session);
    if (board != nullptr) {
      board->Attach(session.host(), session.port(), [&session] { return session.View(); });
    }
    WaitForOutcome(role, outcome, &session, log);
    if (caught_signal != 0) EndByOrder(config, parent, server.get(), &session, outcome);
    if (role == Role::kScheduler) AnswerSpares(config, outcome);
  } catch (...) {
    if (board != nullptr) board->Detach();
    session.Stop();
    throw;
  }
  if (board != nullptr) board->Detach();
  session.Stop();
  ps::MutexLock lock(&outcome->mu);
  if (!outcome->failure.empty()) {
    throw JobFailedError(outcome->failure, outcome->file, outcome->line);
  }
}

}  // namespace

int CaughtSignal() { return caught_signal; }

int SignalStatus() { return StatusOfSignal(); }

int Serve(const Arguments& arguments, const Parent& parent, const char* version) {
  const Config config = Config::FromEnvironment(arguments.settings);
  const Role role = ChooseRole(arguments, config);
  SetDefaultLogLevel(LogLevel::INFO);
  ps::SetLogIdentity(NameOf(role), role == Role::kScheduler ? 0 : -1);
  WarnOfUnknownVariables();
  CheckAddress(config, role);
  wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake_fd < 0) throw Error(std::string("eventfd: ") + strerror(errno));
  SetSignalHandlers();
  JobLog log(config, role, version);
  HealthReport health(role);
  std::unique_ptr<HealthServer> health_server;
  if (const std::string& path = config.String("BYTEPS_HEALTH_SOCKET"); !path.empty()) {
    health_server = std::make_unique<HealthServer>(path, [&health] { return health.Describe(); });
  }
  std::unique_ptr<StatusBoard> board;
  std::unique_ptr<StatusServer> status_server;
  if (role == Role::kScheduler) {
    board = std::make_unique<StatusBoard>(
        version, kMissedHeartbeats * ps::HeartbeatSeconds(config.Float("BYTEPS_PEER_TIMEOUT_S")));
    status_server = StatusServer::Make(config, board.get());
  }
  // A scheduler that keeps the cluster has a single session for all generations.
  const bool keep = role == Role::kServer && config.Bool("BYTEPS_KEEP");
  for (bool rejoin = false;; rejoin = true) {
    Outcome outcome;
    try {
      ServeOnce(config, parent, role, rejoin, arguments.port_file, &health, board.get(), &log,
                &outcome);
    } catch (const JobFailedError& e) {
      if (!keep || caught_signal != 0) throw;
      ps::WriteLogLine('W', e.file(), e.line(),
                       std::string(e.what()) + "; waiting for the next generation of the job");
      std::this_thread::sleep_for(kRejoinPause);  // ended by the time; deadline: the same
      continue;
    } catch (const NotNeededError& e) {
      BPS_LOG(INFO) << "done: " << e.what();
      return 0;
    }
    if (caught_signal != 0) return SignalStatus();
    ps::MutexLock lock(&outcome.mu);
    if (outcome.suspended) continue;
    // The job may have ended in order before the broken invariant was noticed.
    if (ps::NumBrokenInvariants() > 0) throw Error(ps::BrokenInvariants().last);
    return 0;
  }
}

}  // namespace core
}  // namespace byteps
