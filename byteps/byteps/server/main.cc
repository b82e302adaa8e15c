// byteps-server: the scheduler and the servers of a cluster, without Python.
#include <fcntl.h>
#include <getopt.h>
#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>

#include "byteps/base/config.h"
#include "byteps/base/error.h"
#include "byteps/cluster/session.h"
#include "byteps/observe/metrics_server.h"
#include "byteps/observe/status_board.h"
#include "byteps/observe/status_server.h"
#include "byteps/server/health.h"
#include "byteps/server/parent.h"
#include "byteps/server/reducer.h"
#include "byteps/server/sum_server.h"
#include "ps/auth.h"
#include "ps/log_line.h"
#include "ps/nowhere.h"
#ifdef BYTEPS_WITH_RDMA
#include "ps/mutex.h"
#include "ps/verbs_library.h"
#endif

#ifndef BYTEPS_VERSION
#error "the build passes BYTEPS_VERSION"
#endif

namespace byteps {
namespace core {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;
constexpr double kHealthTimeoutS = 3.0;
// A node is shown as silent when it has missed two.
constexpr double kMissedHeartbeats = 2.5;
// How often a server that was told to end looks whether its sums are complete.
constexpr auto kDrainLook = std::chrono::milliseconds(2);
// What the last answers may take to arrive.
constexpr auto kArrivalLimit = std::chrono::seconds(1);
// Before a server that outlived a job joins the next one: a job may fail as soon as it is joined.
constexpr auto kRejoinPause = std::chrono::milliseconds(50);

const char kUsage[] =
    "usage: byteps-server [--role scheduler|server] [--keep] [--port-file PATH]\n"
    "                     [--die-with-parent[=NAME] [--log PATH]]\n"
    "       byteps-server --new-secret PATH\n"
    "       byteps-server --health\n"
    "       byteps-server --print-config | --config-markdown | --metrics-markdown |\n"
    "                     --features | --version | -h\n"
    "\n"
    "Runs the scheduler or one server of a BytePS cluster until its job ends.\n"
    "\n"
    "  --role ROLE         scheduler or server; default: DMLC_ROLE\n"
    "  --keep              outlive a failure of the job, and take its next incarnation, with as\n"
    "                      many workers as then come; the same as BYTEPS_KEEP=1.  A job that ends\n"
    "                      well, or a signal, ends this process as always\n"
    "  --port-file PATH    write \"HOST PORT\" there once this process listens\n"
    "  --die-with-parent[=NAME]\n"
    "                      end when the process that started this one ends, and tell the other\n"
    "                      nodes that NAME was lost\n"
    "  --log PATH          the file that the output goes to: with the parent's end it is removed,\n"
    "                      and its folder with the last file in it\n"
    "  --new-secret PATH   write a random secret for a job there, which this user alone may read;\n"
    "                      the file must not exist\n"
    "  --health            ask the process at BYTEPS_HEALTH_SOCKET how it is: prints its answer\n"
    "                      and exits with 0, or with 1 if there is none within 3 s\n"
    "  --print-config      print the settings in force and exit\n"
    "  --config-markdown   print the reference of all settings and exit\n"
    "  --metrics-markdown  print the reference of all metrics and exit\n"
    "  --features          print what this build has, and can use on this machine, and exit\n"
    "\n"
    "Settings come from the environment, at least DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT,\n"
    "DMLC_NUM_WORKER (not with --keep), DMLC_NUM_SERVER and BYTEPS_SECRET_FILE.\n"
    "\n"
    "Exit status: 0 every worker left in order; 1 the job failed; 2 bad usage or settings;\n"
    "128+n ended by signal n.\n";

struct Arguments {
  std::string role;
  std::string port_file;
  bool die_with_parent = false;
  std::string parent_name;
  std::string log;
};

// What the handlers tell the main thread, which sleeps on `fd`.
struct Outcome {
  ps::Mutex mu;
  bool ended PS_GUARDED_BY(mu) = false;
  bool suspended PS_GUARDED_BY(mu) = false;
  std::string failure PS_GUARDED_BY(mu);
};

int wake_fd = -1;
// The kernel chooses which thread runs the handler; the main thread reads these.
std::atomic<int> caught_signal{0};
std::atomic<int> signal_count{0};
static_assert(std::atomic<int>::is_always_lock_free, "a handler may take no lock");

void Wake() {
  const uint64_t one = 1;
  // A full counter (EAGAIN) has woken the reader already.
  if (write(wake_fd, &one, sizeof(one)) < 0 && errno != EAGAIN) abort();
}

void OnSignal(int number) {
  caught_signal = number;
  ++signal_count;
  Wake();
}

int SignalStatus() {
  return 128 + (caught_signal == kParentEnded ? SIGTERM : caught_signal.load());
}

// Joining blocks until the cluster is complete and looks at no flag: until then a
// signal ends the process by itself (SIG_DFL).
void SetSignalHandlers(void (*handler)(int)) {
  struct sigaction action;
  memset(&action, 0, sizeof(action));
  action.sa_handler = handler;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  if (handler == SIG_DFL) action.sa_handler = &Parent::EndAtOnce;
  sigaction(kParentEnded, &action, nullptr);
  action.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &action, nullptr);
}

// Readers see the whole file or none.
void WritePortFile(const std::string& path, const Session& session) {
  const std::string part = path + ".part";
  std::ofstream out(part);
  out << session.host() << " " << session.port() << "\n";
  out.close();
  if (!out || rename(part.c_str(), path.c_str()) != 0) {
    throw Error("cannot write --port-file " + path + ": " + strerror(errno));
  }
}

void WriteNewSecret(const std::string& path) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (fd < 0) throw Error("cannot make --new-secret " + path + ": " + strerror(errno));
  const std::string text = ps::auth::NewSecret() + "\n";
  const bool written = write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  if (close(fd) != 0 || !written) {
    throw Error("cannot write --new-secret " + path + ": " + strerror(errno));
  }
}

// What a server or scheduler says when it is asked how it is.  Thread-safe.
class HealthReport {
 public:
  explicit HealthReport(Role role) : role_(role) {}

  // `server`: null of a scheduler.
  void Joined(int rank, Server* server) {
    ps::MutexLock lock(&mu_);
    rank_ = rank;
    joined_ = true;
    server_ = server;
  }
  // To be called before the server is destroyed.
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
    // Reading these takes the server's locks: one that is stuck does not answer.
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
  Server* server_ PS_GUARDED_BY(mu_) = nullptr;
};

// Sleeps until the job has an outcome or a signal came.
void WaitForOutcome(Outcome* outcome) {
  while (true) {
    {
      ps::MutexLock lock(&outcome->mu);
      if (outcome->ended || !outcome->failure.empty() || caught_signal != 0) return;
    }
    pollfd item{wake_fd, POLLIN, 0};
    if (poll(&item, 1, -1) > 0) {
      uint64_t count;
      if (read(wake_fd, &count, sizeof(count)) < 0 && errno != EAGAIN) abort();
    }
  }
}

// What the scheduler or a server hears of its job, for the main thread.
class Node : public ChannelUser {
 public:
  // `server` is null on the scheduler, `board` on a server.
  Node(Server* server, StatusBoard* board, Outcome* outcome)
      : server_(server), board_(board), outcome_(outcome) {}

  void OnMessage(ps::Message* msg) override {
    if (server_ != nullptr) server_->OnMessage(msg);
  }

  char* PlaceFor(const ps::Meta& meta, size_t bytes) override {
    return server_ != nullptr && server_->Expects(meta, bytes) ? nullptr : ps::Nowhere();
  }

  void OnEvent(const ps::MembershipEvent& event) override {
    if (event.kind == ps::MembershipEvent::kNodeLeft && server_ != nullptr) {
      server_->OnWorkerGone(event.rank, event.reason);
      return;
    }
    if (event.kind == ps::MembershipEvent::kReported) {
      if (board_ != nullptr) board_->OnReport(event.node_id, event.report);
      return;
    }
    const bool is_scheduler = server_ == nullptr;
    if (event.kind == ps::MembershipEvent::kFailed && event.next_incarnation > 0) {
      if (board_ != nullptr) board_->OnIncarnation();
      ps::WriteLogLine('W', __FILE__, __LINE__,
                       "incarnation " + std::to_string(event.next_incarnation - 1) +
                           " of the job failed: " + event.reason + "; waiting for incarnation " +
                           std::to_string(event.next_incarnation));
      return;
    }
    ps::MutexLock lock(&outcome_->mu);
    if (event.kind == ps::MembershipEvent::kFailed && outcome_->failure.empty())
      outcome_->failure = event.reason;
    // The scheduler stays for those who come back.
    if (event.kind == ps::MembershipEvent::kEnded && !(is_scheduler && event.suspended)) {
      outcome_->ended = true;
      outcome_->suspended = event.suspended;
    }
    Wake();
  }

  std::string Report() override { return server_ != nullptr ? server_->Report() : ""; }

 private:
  Server* const server_;
  StatusBoard* const board_;
  Outcome* const outcome_;
};

// Told to end by a signal: a server finishes the sums that some workers have pushed and others
// have not, no longer than BYTEPS_STOP_TIMEOUT_S, and ends the job, so that everybody learns why.
// A second signal, or the end of the job, ends the wait.
void EndByOrder(const Config& config, const Parent& parent, Server* server, Session* session,
                Outcome* outcome) {
  if (caught_signal == kParentEnded) {  // no sum that a rank lacks will be complete
    session->StopByOrder(parent.How());
    return;
  }
  const auto deadline = std::chrono::steady_clock::now() +
                        std::chrono::duration<double>(config.Float("BYTEPS_STOP_TIMEOUT_S"));
  const int signals = signal_count;
  const auto over = [outcome] {
    ps::MutexLock lock(&outcome->mu);
    return outcome->ended || !outcome->failure.empty();
  };
  bool drained = server == nullptr || server->OpenRounds() == 0;
  while (!drained && !over() && signal_count == signals &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kDrainLook);
    drained = server->OpenRounds() == 0;
  }
  // Who heard of the end before its sum has come would fail without it.
  const auto arrived_by = std::chrono::steady_clock::now() + kArrivalLimit;
  while (drained && !session->AllArrived() && !over() && signal_count == signals &&
         std::chrono::steady_clock::now() < arrived_by) {
    std::this_thread::sleep_for(kDrainLook);
  }
  if (over()) return;
  session->StopByOrder(std::string("stopped by order (") +
                       (caught_signal == SIGINT ? "SIGINT" : "SIGTERM") + ")" +
                       (drained ? "" : " before the sums under way were complete"));
}

// What the last incarnation has used goes back to the kernel.  The C library would keep it, in the
// arenas of threads that are gone, and the threads of this one may get other arenas.
void ReturnMemory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

// Serves one job.  Throws JobFailedError when it fails, another Error when it cannot be joined.
void ServeOnce(const Config& config, const Parent& parent, Role role, bool rejoin,
               const std::string& port_file, HealthReport* health, StatusBoard* board,
               Outcome* outcome) {
  SessionOptions options;
  options.role = role;
  options.num_workers = static_cast<int>(config.Int("DMLC_NUM_WORKER"));
  options.num_servers = static_cast<int>(config.Int("DMLC_NUM_SERVER"));
  options.rejoin = rejoin;
  Session session(config, options);
  std::unique_ptr<Server> server;
  std::unique_ptr<MetricsServer> metrics_server;
  if (role == Role::kServer) {
    server = std::make_unique<Server>(config, &session);
    const MetricsSource source{Role::kServer, [&server] { return server->rank(); },
                               [&server] { return server->Metrics(); }};
    const int local_rank = static_cast<int>(config.Int("BYTEPS_LOCAL_RANK"));
    metrics_server = MetricsServer::Make(config, local_rank, source);
  }
  Node node(server.get(), board, outcome);
  SetSignalHandlers(SIG_DFL);
  if (caught_signal != 0) return;  // after the last job, before this one
  session.Start(&node);
  if (rejoin) ReturnMemory();  // only now is the last session's transport gone
  if (server) server->SetRank(session.rank());
  health->Joined(session.rank(), server.get());
  const struct Leaver {
    HealthReport* health;
    ~Leaver() { health->Left(); }
  } leaver{health};
  SetSignalHandlers(OnSignal);
  try {
    if (!port_file.empty()) WritePortFile(port_file, session);
    if (board != nullptr) {
      board->Attach(session.host(), session.port(), [&session] { return session.View(); });
    }
    WaitForOutcome(outcome);
    if (caught_signal != 0) EndByOrder(config, parent, server.get(), &session, outcome);
  } catch (...) {
    if (board != nullptr) board->Detach();
    session.Stop();
    throw;
  }
  if (board != nullptr) board->Detach();
  session.Stop();
  ps::MutexLock lock(&outcome->mu);
  if (!outcome->failure.empty()) throw JobFailedError(outcome->failure);
}

Role ChooseRole(const Arguments& arguments, const Config& config) {
  const std::string name = arguments.role.empty() ? config.String("DMLC_ROLE") : arguments.role;
  if (name == "scheduler") return Role::kScheduler;
  if (name == "server") return Role::kServer;
  if (arguments.role.empty()) {
    throw UsageError("say --role scheduler or --role server, or set DMLC_ROLE to one of them");
  }
  throw UsageError("--role " + name + " is not allowed: it must be scheduler or server");
}

void CheckAddress(const Config& config, Role role) {
  for (const char* name :
       {"DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER"}) {
    if (config.Bool("BYTEPS_KEEP") && strcmp(name, "DMLC_NUM_WORKER") == 0) continue;
    if (!config.IsSet(name)) throw UsageError(std::string(name) + " is not set");
  }
  if (config.String("DMLC_PS_ROOT_URI").empty()) throw UsageError("DMLC_PS_ROOT_URI is empty");
  if (role == Role::kServer && config.Int("DMLC_PS_ROOT_PORT") == 0) {
    throw UsageError(
        "DMLC_PS_ROOT_PORT=0 is for the scheduler alone; give the server the port it listens on");
  }
}

void WarnOfUnknownVariables() {
  for (const auto& warning : Config::UnknownVariables()) {
    ps::WriteLogLine('W', __FILE__, __LINE__, warning);
  }
}

int Serve(const Arguments& arguments, const Parent& parent) {
  const Config config = Config::FromEnvironment();
  const Role role = ChooseRole(arguments, config);
  ps::SetLogIdentity(NameOf(role), role == Role::kScheduler ? 0 : -1);
  WarnOfUnknownVariables();
  CheckAddress(config, role);
  wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake_fd < 0) throw Error(std::string("eventfd: ") + strerror(errno));
  HealthReport health(role);
  std::unique_ptr<HealthServer> health_server;
  if (const std::string& path = config.String("BYTEPS_HEALTH_SOCKET"); !path.empty()) {
    health_server = std::make_unique<HealthServer>(path, [&health] { return health.Describe(); });
  }
  std::unique_ptr<StatusBoard> board;
  std::unique_ptr<StatusServer> status_server;
  if (role == Role::kScheduler) {
    board = std::make_unique<StatusBoard>(
        BYTEPS_VERSION,
        kMissedHeartbeats * ps::HeartbeatSeconds(config.Float("BYTEPS_PEER_TIMEOUT_S")));
    status_server = StatusServer::Make(config, board.get());
  }
  // A scheduler that keeps the cluster stays in its session through all incarnations.
  const bool keep = role == Role::kServer && config.Bool("BYTEPS_KEEP");
  for (bool rejoin = false;; rejoin = true) {
    Outcome outcome;
    try {
      ServeOnce(config, parent, role, rejoin, arguments.port_file, &health, board.get(), &outcome);
    } catch (const JobFailedError& e) {
      if (!keep || caught_signal != 0) throw;
      ps::WriteLogLine('W', __FILE__, __LINE__,
                       std::string(e.what()) + "; waiting for the next incarnation of the job");
      std::this_thread::sleep_for(kRejoinPause);
      continue;
    }
    if (caught_signal != 0) return SignalStatus();
    ps::MutexLock lock(&outcome.mu);
    if (!outcome.suspended) return 0;
  }
}

// One line each: what this build has and, as far as that matters, what it finds here.
std::string Features() {
  std::string rdma = "not compiled in";
#ifdef BYTEPS_WITH_RDMA
  rdma = "yes";
  try {
    ps::rdma::LoadVerbsLibraries();
  } catch (const std::exception& e) {
    rdma = std::string("no: ") + e.what();
  }
#endif
  return std::string("additions: ") + InstructionSet() + "\nrdma: " + rdma + "\n";
}

int Main(int argc, char** argv) {
  enum {
    kRole = 1,
    kKeep,
    kPortFile,
    kDie,
    kLog,
    kSecret,
    kHealth,
    kPrint,
    kMarkdown,
    kMetrics,
    kFeatures,
    kVersion
  };
  const option options[] = {{"role", required_argument, nullptr, kRole},
                            {"keep", no_argument, nullptr, kKeep},
                            {"port-file", required_argument, nullptr, kPortFile},
                            {"die-with-parent", optional_argument, nullptr, kDie},
                            {"log", required_argument, nullptr, kLog},
                            {"new-secret", required_argument, nullptr, kSecret},
                            {"health", no_argument, nullptr, kHealth},
                            {"print-config", no_argument, nullptr, kPrint},
                            {"config-markdown", no_argument, nullptr, kMarkdown},
                            {"metrics-markdown", no_argument, nullptr, kMetrics},
                            {"features", no_argument, nullptr, kFeatures},
                            {"version", no_argument, nullptr, kVersion},
                            {"help", no_argument, nullptr, 'h'},
                            {nullptr, 0, nullptr, 0}};
  Arguments arguments;
  Parent parent(getppid());
  try {
    for (int c; (c = getopt_long(argc, argv, "h", options, nullptr)) != -1;) {
      switch (c) {
        case kRole:
          arguments.role = optarg;
          break;
        case kKeep:
          setenv("BYTEPS_KEEP", "1", 1);
          break;
        case kPortFile:
          arguments.port_file = optarg;
          break;
        case kDie:
          arguments.die_with_parent = true;
          if (optarg != nullptr) arguments.parent_name = optarg;
          break;
        case kLog:
          arguments.log = optarg;
          break;
        case kSecret:
          WriteNewSecret(optarg);
          return 0;
        case kHealth: {
          const std::string path = Config::FromEnvironment().String("BYTEPS_HEALTH_SOCKET");
          if (path.empty()) throw UsageError("--health needs BYTEPS_HEALTH_SOCKET");
          std::cout << AskHealth(path, kHealthTimeoutS) << "\n";
          return 0;
        }
        case kPrint:
          WarnOfUnknownVariables();
          std::cout << Config::FromEnvironment().Print();
          return 0;
        case kMarkdown:
          std::cout << Config::Markdown();
          return 0;
        case kMetrics:
          std::cout << MetricsMarkdown();
          return 0;
        case kFeatures:
          std::cout << Features();
          return 0;
        case kVersion:
          std::cout << "byteps-server " << BYTEPS_VERSION << "\n";
          return 0;
        case 'h':
          std::cout << kUsage;
          return 0;
        default:
          std::cerr << kUsage;
          return kExitUsage;
      }
    }
    if (optind < argc) throw UsageError(std::string("unexpected argument '") + argv[optind] + "'");
    if (arguments.die_with_parent && !parent.Watch(arguments.parent_name, arguments.log)) {
      parent.RemoveLog();
      return 128 + SIGTERM;
    }
    const int status = Serve(arguments, parent);
    if (caught_signal == kParentEnded && parent.HasEnded()) parent.RemoveLog();
    return status;
  } catch (const UsageError& e) {
    std::cerr << "byteps-server: " << e.what() << "\n";
    return kExitUsage;
  } catch (const std::exception& e) {
    // A failure may be the parent's end as others have noticed it.
    const bool perhaps = caught_signal == 0 || caught_signal == kParentEnded;
    if (perhaps && parent.HasEnded()) parent.RemoveLog();
    if (caught_signal != 0) return SignalStatus();
    ps::WriteLogLine('E', __FILE__, __LINE__, e.what());
    return kExitFailure;
  }
}

}  // namespace
}  // namespace core
}  // namespace byteps

int main(int argc, char** argv) { return byteps::core::Main(argc, argv); }
