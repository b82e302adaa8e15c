#include <cstdio>
#include <string>
#include <tuple>
#include <utility>

#include "byteps/base/config.h"
#include "byteps/base/error.h"

namespace byteps {
namespace core {
namespace {

// The launcher's variable, else ours, else `fallback`.
int Choose(const Config& config, const char* launcher, const char* ours, int fallback) {
  const bool by_launcher = config.IsSet(launcher);
  const bool by_us = config.IsSet(ours);
  if (by_launcher && by_us && config.Int(launcher) != config.Int(ours)) {
    throw UsageError(std::string(launcher) + "=" + std::to_string(config.Int(launcher)) + " and " +
                     ours + "=" + std::to_string(config.Int(ours)) + " disagree; unset " + ours);
  }
  if (by_launcher) return static_cast<int>(config.Int(launcher));
  if (by_us) return static_cast<int>(config.Int(ours));
  return fallback;
}

// Our variable, else the launcher's: some launchers tell every worker that it is alone on its host.
int Prefer(const Config& config, const char* ours, const char* launcher) {
  return static_cast<int>(config.Int(config.IsSet(ours) ? ours : launcher));
}

// BYTEPS_REPLICA, the replica's number and how many there are.
std::pair<int, int> ReplicaOf(const Config& config) {
  const std::string& text = config.String("BYTEPS_REPLICA");
  if (text.empty()) return {0, 1};
  constexpr int kMost = 4096;
  int number = -1;
  int count = 0;
  char rest = 0;
  if (sscanf(text.c_str(), "%4d/%4d%c", &number, &count, &rest) != 2 || number < 0 ||
      number >= count || count > kMost) {
    throw UsageError("BYTEPS_REPLICA='" + text +
                     "' is not NUMBER/COUNT: 0/4, 1/4, 2/4 and 3/4 are four replicas");
  }
  return {number, count};
}

// WORLD_SIZE is the replica's own; DMLC_NUM_WORKER, the same on all nodes, counts all of them.
int WorkersOfReplica(const Config& config, int replicas) {
  if (replicas == 1 || !config.IsSet("DMLC_NUM_WORKER")) {
    return Choose(config, "WORLD_SIZE", "DMLC_NUM_WORKER", 1);
  }
  const auto all = static_cast<int>(config.Int("DMLC_NUM_WORKER"));
  const auto own =
      config.IsSet("WORLD_SIZE") ? static_cast<int>(config.Int("WORLD_SIZE")) : all / replicas;
  if (all != own * replicas) {
    throw UsageError("DMLC_NUM_WORKER=" + std::to_string(all) + " is not " +
                     std::to_string(replicas) + " replicas (BYTEPS_REPLICA) of equal size" +
                     (config.IsSet("WORLD_SIZE") ? ", WORLD_SIZE=" + std::to_string(own) : ""));
  }
  return own;
}

}  // namespace

Launch Launch::From(const Config& config) {
  Launch launch;
  std::tie(launch.replica, launch.replicas) = ReplicaOf(config);
  launch.rank = Choose(config, "RANK", "DMLC_WORKER_ID", 0);
  launch.size = WorkersOfReplica(config, launch.replicas);
  launch.local_rank = Prefer(config, "BYTEPS_LOCAL_RANK", "LOCAL_RANK");
  launch.local_size = Prefer(config, "BYTEPS_LOCAL_SIZE", "LOCAL_WORLD_SIZE");
  if (launch.rank >= launch.size) {
    throw UsageError("the rank " + std::to_string(launch.rank) +
                     " (RANK, DMLC_WORKER_ID) is not below the number of workers, " +
                     std::to_string(launch.size) + " (WORLD_SIZE, DMLC_NUM_WORKER)");
  }
  launch.rank += launch.replica * launch.size;
  launch.size *= launch.replicas;
  return launch;
}

}  // namespace core
}  // namespace byteps
