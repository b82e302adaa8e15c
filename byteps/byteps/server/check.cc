#include "byteps/server/check.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/base/error.h"
#include "byteps/base/log_line.h"
#include "byteps/cluster/session.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/membership/event.h"
#include "byteps/observe/metrics_server.h"
#include "byteps/observe/status_board.h"
#include "byteps/observe/status_server.h"
#include "byteps/observe/trace.h"
#include "byteps/server/health.h"

namespace byteps {
namespace core {
namespace {

// Tells of the address at which the process could listen, and hears nothing else.
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
  // The worst that any of them found.
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

 private:
  void Complain(const std::string& what, int status) {
    std::cout << "WRONG " << what << std::endl;
    // A setting before a failure, and both before a scheduler that is not there.
    if (status_ == 0 || status_ == kExitNoScheduler) status_ = status;
    if (status == kExitUsage) status_ = status;
  }

  int status_ = 0;
};

// Ports of this process in addition to the one for the job, and what else it opens by name.
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
  options.rank = ranked ? launch.rank : -1;        // any that is free
  options.num_workers = known ? launch.size : -1;  // whatever the job has
  *local_rank = launch.local_rank;
  return options;
}

}  // namespace

int Check(const Arguments& arguments, const char* version) {
  Checks checks;
  checks.Try([&] {
    const Config config = Config::FromEnvironment();
    const Role role = ChooseRole(arguments, config);
    ps::SetLogIdentity(NameOf(role), -1);
    WarnOfUnknownVariables();
    CheckAddress(config, role);
    int local_rank = 0;
    const SessionOptions options = OptionsOf(config, role, &local_rank);
    checks.Ok(std::string("the settings of a ") + NameOf(role) + " (byteps " + version + ")");
    TryLocalThings(config, role, arguments, local_rank, &checks);
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

}  // namespace core
}  // namespace byteps
