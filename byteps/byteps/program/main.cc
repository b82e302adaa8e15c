// byteps-server: runs the scheduler or a server of a cluster, without Python.
#include <fcntl.h>
#include <getopt.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/protocol.h"
#include "byteps/cluster/session.h"
#include "byteps/net/auth/secret.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/membership/event.h"
#include "byteps/observe/metrics.h"
#include "byteps/observe/metrics_server.h"
#include "byteps/observe/status_board.h"
#include "byteps/observe/status_server.h"
#include "byteps/observe/trace.h"
#include "byteps/program/health_server.h"
#include "byteps/program/serve.h"
#include "byteps/server/reducer.h"
#ifdef BYTEPS_WITH_RDMA
#include "byteps/net/rdma/verbs.h"
#endif

#ifndef BYTEPS_VERSION
#error "the build passes BYTEPS_VERSION"
#endif

namespace byteps {
namespace core {

const char kUsage[] =
    "usage: byteps-server [--role scheduler|server] [--keep] [--port-file PATH]\n"
    "                     [--die-with-parent[=NAME] [--log PATH]]\n"
    "       byteps-server --check[=N] [--role scheduler|server|worker] [--keep]\n"
    "       byteps-server --new-secret PATH\n"
    "       byteps-server --health\n"
    "       byteps-server --print-config | --config-markdown | --metrics-markdown |\n"
    "                     --features | --version | -h\n"
    "\n"
    "Runs the scheduler or one server of a BytePS cluster until its job ends.\n"
    "\n"
    "  --role ROLE         scheduler or server; default: DMLC_ROLE\n"
    "  --keep              survive a failure of the job, and accept its restart, with as\n"
    "                      many workers as then come; the same as BYTEPS_KEEP=1.  A job that ends\n"
    "                      well, or a signal, ends this process as always\n"
    "  --port-file PATH    write \"HOST PORT\" there once this process listens\n"
    "  --die-with-parent[=NAME]\n"
    "                      end when the process that started this one ends, and tell the other\n"
    "                      nodes that NAME was lost\n"
    "  --log PATH          the file that the output goes to: with the parent's end it is removed,\n"
    "                      and its folder with the last file in it\n"
    "  --check[=N]         look whether N (1) such processes of this machine could join the job,\n"
    "                      and join nothing: reads all settings, listens for a moment, opens the\n"
    "                      network device, and asks the scheduler, also one whose job runs\n"
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
    "128+n ended by signal n.  A second signal ends the process within 3 s.\n"
    "Of --check: 0 it would be admitted; 1 something is wrong; 2 a setting is; 3 nothing that can "
    "be\n"
    "seen here is wrong, but the scheduler does not answer: start it, and check again.\n";

Role ChooseRole(const Arguments& arguments, const Config& config) {
  const std::string name = arguments.role.empty() ? config.String("DMLC_ROLE") : arguments.role;
  if (name == "scheduler") return Role::kScheduler;
  if (name == "server") return Role::kServer;
  if (name == "worker" && arguments.check > 0) return Role::kWorker;
  if (arguments.role.empty()) {
    throw UsageError("say --role scheduler or --role server, or set DMLC_ROLE to one of them");
  }
  throw UsageError("--role " + name + " is not allowed: it must be scheduler or server" +
                   (arguments.check > 0 ? ", or worker" : ""));
}

void CheckAddress(const Config& config, Role role) {
  for (const char* name :
       {"DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER"}) {
    const bool workers = strcmp(name, "DMLC_NUM_WORKER") == 0;
    // A kept cluster accepts any number of workers, and a worker may get the number from its
    // launcher. So neither needs the variable.
    if (workers && (config.Bool("BYTEPS_KEEP") || role == Role::kWorker)) continue;
    if (!config.IsSet(name)) throw UsageError(std::string(name) + " is not set");
  }
  if (config.String("DMLC_PS_ROOT_URI").empty()) throw UsageError("DMLC_PS_ROOT_URI is empty");
  if (role != Role::kScheduler && config.Int("DMLC_PS_ROOT_PORT") == 0) {
    throw UsageError(std::string("DMLC_PS_ROOT_PORT=0 is for the scheduler alone; give the ") +
                     NameOf(role) + " the port it listens on");
  }
}

void WarnOfUnknownVariables() {
  for (const auto& variable : Config::UnknownVariables()) {
    ps::WriteLogLine('W', __FILE__, __LINE__, variable.Describe());
  }
}

namespace {

// Reports the address on which the process could listen; ignores all other events.
class Listener : public ChannelUser {
 public:
  explicit Listener(std::string how) : how_(std::move(how)) {}
  void OnMessage(Message*) override {}
  void OnEvent(const ps::MembershipEvent& event) override {
    if (event.kind != ps::MembershipEvent::kListens) return;
    std::cout << "ok    it can listen at " << PlaceOf(event.node) << how_ << std::endl;
  }

 private:
  const std::string how_;
};

class Checks {
 public:
  // Returns the worst status of all checks.
  int status() const { return status_; }

  void Try(const std::function<void()>& check) {
    try {
      check();
    } catch (const UsageError& e) {
      Complain(e.what(), kExitUsage);
    } catch (const NoSchedulerError& e) {
      Complain(
          std::string(e.what()) + ": start it first, or look at its address and at the firewall",
          kExitNoScheduler);
    } catch (const std::exception& e) {
      Complain(e.what(), kExitFailure);
    }
  }
  void Ok(const std::string& what) { std::cout << "ok    " << what << std::endl; }
  void Note(const std::string& what) { std::cout << "note  " << what << std::endl; }

 private:
  void Complain(const std::string& what, int status) {
    std::cout << "WRONG " << what << std::endl;
    // Wrong settings outrank failures. Both outrank a missing scheduler.
    if (status_ == 0 || status_ == kExitNoScheduler) status_ = status;
    if (status == kExitUsage) status_ = status;
  }

  int status_ = 0;
};

// Checks the environment's variables. An ignored variable is an error if a known one was probably
// meant.
void TryVariables(Checks* checks) {
  for (const auto& variable : Config::UnknownVariables()) {
    if (variable.meant.empty()) {
      checks->Note(variable.Describe());
    } else {
      checks->Try([&] { throw UsageError(variable.Describe()); });
    }
  }
}

// Tries things of this machine: this process's other ports, and the files that it opens.
void TryLocalThings(const Config& config, Role role, const Arguments& arguments, int local_rank,
                    Checks* checks) {
  for (int i = 0; i < arguments.check && role != Role::kScheduler; ++i) {
    checks->Try([&] {
      const MetricsSource nothing{role, [] { return -1; }, [] { return std::vector<Metric>(); }};
      if (!MetricsServer::Make(config, local_rank + i, nothing)) return;
      checks->Ok("metrics can be served at port " +
                 std::to_string(config.Int("BYTEPS_METRICS_PORT") + local_rank + i));
    });
  }
  if (role == Role::kServer && arguments.check > 1 && config.Int("BYTEPS_NODE_PORT") != 0) {
    checks->Try([&] {
      throw UsageError("BYTEPS_NODE_PORT=" + std::to_string(config.Int("BYTEPS_NODE_PORT")) +
                       " is one port, and " + std::to_string(arguments.check) +
                       " servers of this machine would listen there: unset it");
    });
  }
  checks->Try([&] { Tracer::Make(config); });
  if (role == Role::kWorker) return;
  checks->Try([&] {
    const std::string& path = config.String("BYTEPS_HEALTH_SOCKET");
    if (!path.empty()) HealthServer(path, [] { return "it is only checked"; });
  });
  checks->Try([&] {
    if (role != Role::kScheduler) return;
    StatusBoard board("", 1);
    if (StatusServer::Make(config, &board)) {
      checks->Ok("the status page can be shown at port " +
                 std::to_string(config.Int("BYTEPS_STATUS_PORT")));
    }
  });
  checks->Try([&] {
    if (arguments.port_file.empty()) return;
    const auto folder = std::filesystem::absolute(arguments.port_file).parent_path();
    if (access(folder.c_str(), W_OK | X_OK) == 0) return;
    throw Error("cannot write --port-file " + arguments.port_file + ": " + strerror(errno));
  });
}

SessionOptions OptionsOf(const Config& config, Role role, int* local_rank) {
  SessionOptions options;
  options.role = role;
  options.num_workers = static_cast<int>(config.Int("DMLC_NUM_WORKER"));
  options.num_servers = static_cast<int>(config.Int("DMLC_NUM_SERVER"));
  *local_rank = static_cast<int>(config.Int("BYTEPS_LOCAL_RANK"));
  if (role != Role::kWorker) return options;
  const Launch launch = Launch::From(config);
  const bool known = config.IsSet("WORLD_SIZE") || config.IsSet("DMLC_NUM_WORKER");
  const bool ranked = config.IsSet("RANK") || config.IsSet("DMLC_WORKER_ID");
  options.rank = ranked ? launch.rank : -1;        // -1: any free rank
  options.num_workers = known ? launch.size : -1;  // -1: the job's number
  *local_rank = launch.local_rank;
  return options;
}

}  // namespace

int Check(const Arguments& arguments, const char* version) {
  Checks checks;
  checks.Try([&] {
    const Config config = Config::FromEnvironment(arguments.settings);
    const Role role = ChooseRole(arguments, config);
    ps::SetLogIdentity(NameOf(role), -1);
    TryVariables(&checks);
    const bool starts_its_own = role == Role::kWorker && config.String("DMLC_PS_ROOT_URI").empty();
    if (!starts_its_own) CheckAddress(config, role);
    int local_rank = 0;
    const SessionOptions options = OptionsOf(config, role, &local_rank);
    checks.Ok(
        std::string("the settings of a ") + NameOf(role) + " (byteps " + version + ")" +
        (starts_its_own ? "; no scheduler is given: the job starts its own (embedded mode)" : ""));
    TryLocalThings(config, role, arguments, local_rank, &checks);
    if (starts_its_own) return;
    checks.Try([&] {
      Listener listener(UsesRdma(config)            ? " by RDMA"
                        : config.Bool("BYTEPS_TLS") ? " by TCP, with TLS"
                                                    : " by TCP");
      const std::string counts = Session(config, options).Probe(&listener, arguments.check);
      if (role == Role::kScheduler) return;
      checks.Ok("the scheduler would admit " +
                (arguments.check == 1
                     ? std::string("this ") + NameOf(role)
                     : std::to_string(arguments.check) + " " + NameOf(role) + "s of this machine") +
                ": " + counts);
    });
  });
  return checks.status();
}

namespace {

constexpr double kHealthTimeoutS = 3.0;
constexpr int kMaxProcesses = 65536;

void WriteNewSecret(const std::string& path) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (fd < 0) throw Error("cannot make --new-secret " + path + ": " + strerror(errno));
  const std::string text = ps::auth::NewSecret() + "\n";
  const bool written = write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  if (close(fd) != 0 || !written) {
    throw Error("cannot write --new-secret " + path + ": " + strerror(errno));
  }
}

// Returns a line for each feature of this build. The line says what the feature finds on this
// machine.
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

// Returns the N of --check=N; 1 without N.
int Processes(const char* text) {
  if (text == nullptr) return 1;
  char* end = nullptr;
  const long n = strtol(text, &end, 10);
  if (end != text && *end == '\0' && n >= 1 && n <= kMaxProcesses) return static_cast<int>(n);
  throw UsageError(std::string("--check=") + text +
                   " is not allowed: it must be a number from 1 to " +
                   std::to_string(kMaxProcesses));
}

// Returns the exit status after an error that was found at this source location.
int EndOf(const Parent& parent, const char* file, int line, const char* what) {
  // If the parent has ended, other nodes may have noticed that first, and reported it as a failure.
  const bool perhaps = CaughtSignal() == 0 || CaughtSignal() == kParentEnded;
  if (perhaps && parent.HasEnded()) parent.RemoveLog();
  const bool by_signal = CaughtSignal() != 0;
  ps::WriteLogLine(by_signal ? 'W' : 'E', file, line, what);
  return by_signal ? SignalStatus() : kExitFailure;
}

int Main(int argc, char** argv) {
  enum {
    kRole = 1,
    kKeep,
    kPortFile,
    kDie,
    kLog,
    kCheck,
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
                            {"check", optional_argument, nullptr, kCheck},
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
          arguments.settings["BYTEPS_KEEP"] = "1";
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
        case kCheck:
          arguments.check = Processes(optarg);
          break;
        case kSecret:
          WriteNewSecret(optarg);
          return 0;
        case kHealth: {
          const std::string path =
              Config::FromEnvironment(arguments.settings).String("BYTEPS_HEALTH_SOCKET");
          if (path.empty()) throw UsageError("--health needs BYTEPS_HEALTH_SOCKET");
          std::cout << AskHealth(path, kHealthTimeoutS) << "\n";
          return 0;
        }
        case kPrint:
          WarnOfUnknownVariables();
          std::cout << Config::FromEnvironment(arguments.settings).Print();
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
    if (arguments.check > 0) return Check(arguments, BYTEPS_VERSION);
    if (arguments.die_with_parent && !parent.Watch(arguments.parent_name, arguments.log)) {
      parent.RemoveLog();
      return 128 + SIGTERM;
    }
    const int status = Serve(arguments, parent, BYTEPS_VERSION);
    if (CaughtSignal() == kParentEnded && parent.HasEnded()) parent.RemoveLog();
    return status;
  } catch (const UsageError& e) {
    std::cerr << "byteps-server: " << e.what() << "\n";
    return kExitUsage;
  } catch (const Error& e) {
    return EndOf(parent, e.file(), e.line(), e.what());
  } catch (const std::exception& e) {
    return EndOf(parent, __FILE__, __LINE__, e.what());
  }
}

}  // namespace
}  // namespace core
}  // namespace byteps

int main(int argc, char** argv) { return byteps::core::Main(argc, argv); }
