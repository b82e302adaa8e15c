#include <string>

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

}  // namespace

Launch Launch::From(const Config& config) {
  Launch launch;
  launch.rank = Choose(config, "RANK", "DMLC_WORKER_ID", 0);
  launch.size = Choose(config, "WORLD_SIZE", "DMLC_NUM_WORKER", 1);
  launch.local_rank = Choose(config, "LOCAL_RANK", "BYTEPS_LOCAL_RANK", 0);
  launch.local_size = Choose(config, "LOCAL_WORLD_SIZE", "BYTEPS_LOCAL_SIZE", 1);
  if (launch.rank >= launch.size) {
    throw UsageError("the rank " + std::to_string(launch.rank) +
                     " (RANK, DMLC_WORKER_ID) is not below the number of workers, " +
                     std::to_string(launch.size) + " (WORLD_SIZE, DMLC_NUM_WORKER)");
  }
  return launch;
}

}  // namespace core
}  // namespace byteps
