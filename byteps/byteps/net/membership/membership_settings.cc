#include "byteps/net/membership/membership_settings.h"

#include <algorithm>

#include "ps/internal/env.h"
#include "ps/internal/utils.h"

namespace ps {
namespace {

// Of nine digits, as messages have it.
constexpr double kMostMbps = 999'999'999;

double Number(const char* name, double fallback) {
  const char* text = Environment::Get()->find(name);
  return text == nullptr ? fallback : atof(text);
}

}  // namespace

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
  settings.replicas = GetEnv("BYTEPS_REPLICAS", 1);
  settings.probe = GetEnv("BYTEPS_PROBE", 0);
  settings.keep = GetEnv("BYTEPS_KEEP", 0) != 0;
  settings.keep_timeout_s = Number("BYTEPS_KEEP_TIMEOUT_S", settings.keep_timeout_s);
  settings.replace_servers_s = Number("BYTEPS_REPLACE_SERVERS_S", settings.replace_servers_s);
  settings.backups = GetEnv("BYTEPS_BACKUP_STATE", 0) != 0;
  settings.scheduler_return_s = Number("BYTEPS_SCHEDULER_RETURN_S", settings.scheduler_return_s);
  return settings;
}

}  // namespace ps
