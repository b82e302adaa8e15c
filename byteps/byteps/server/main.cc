// byteps-server: the scheduler and the servers of a cluster, without Python.
#include <fcntl.h>
#include <getopt.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>

#include "byteps/base/config.h"
#include "byteps/base/error.h"
#include "byteps/base/log_line.h"
#include "byteps/net/auth/secret.h"
#include "byteps/observe/metrics.h"
#include "byteps/observe/metrics_server.h"
#include "byteps/server/check.h"
#include "byteps/server/health.h"
#include "byteps/server/options.h"
#include "byteps/server/parent.h"
#include "byteps/server/reducer.h"
#include "byteps/server/serve.h"
#ifdef BYTEPS_WITH_RDMA
#include "byteps/net/rdma/verbs_library.h"
#endif

#ifndef BYTEPS_VERSION
#error "the build passes BYTEPS_VERSION"
#endif

namespace byteps {
namespace core {
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

// The N of --check=N; 1 without one.
int Processes(const char* text) {
  if (text == nullptr) return 1;
  char* end = nullptr;
  const long n = strtol(text, &end, 10);
  if (end != text && *end == '\0' && n >= 1 && n <= kMaxProcesses) return static_cast<int>(n);
  throw UsageError(std::string("--check=") + text +
                   " is not allowed: it must be a number from 1 to " +
                   std::to_string(kMaxProcesses));
}

// The exit status after an error, which was found at that place.
int EndOf(const Parent& parent, const char* file, int line, const char* what) {
  // A failure may be the parent's end as others have noticed it.
  const bool perhaps = CaughtSignal() == 0 || CaughtSignal() == kParentEnded;
  if (perhaps && parent.HasEnded()) parent.RemoveLog();
  if (CaughtSignal() != 0) return SignalStatus();
  ps::WriteLogLine('E', file, line, what);
  return kExitFailure;
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
        case kCheck:
          arguments.check = Processes(optarg);
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
