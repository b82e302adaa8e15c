#include "byteps/net/net_settings.h"

#include <algorithm>

#include "byteps/net/auth/secret.h"
#include "byteps/net/link/rdma_choice.h"
#include "byteps/net/tls/tls.h"

namespace ps {

using byteps::core::Config;
using byteps::core::Role;

namespace {

// Messages carry rates in nine digits.
constexpr double kMostMbps = 999'999'999;

int Int(const Config& config, const char* name) { return static_cast<int>(config.Int(name)); }

auth::Secret SecretOf(const Config& config) {
  return auth::Secret::Read({config.Bool("BYTEPS_AUTH"), config.String("BYTEPS_SECRET"),
                             config.String("BYTEPS_SECRET_FILE")});
}

tls::TlsSettings TlsOf(const Config& config) {
  return {config.Bool("BYTEPS_TLS"),
          {config.String("BYTEPS_TLS_CERT"), config.String("BYTEPS_TLS_KEY"),
           config.String("BYTEPS_TLS_CA")}};
}

MembershipSettings MembershipOf(const Config& config, Role role) {
  MembershipSettings settings;
  settings.is_scheduler = role == Role::kScheduler;
  settings.peer_timeout_s = config.Float("BYTEPS_PEER_TIMEOUT_S");
  settings.start_timeout_s = config.Float("BYTEPS_START_TIMEOUT_S");
  settings.workers = Int(config, "DMLC_NUM_WORKER");
  settings.servers = Int(config, "DMLC_NUM_SERVER");
  settings.rank = Int(config, "DMLC_WORKER_ID");
  settings.link_mbps =
      static_cast<int>(std::min(config.Float("BYTEPS_LINK_GBPS") * 1000, kMostMbps));
  settings.keep = config.Bool("BYTEPS_KEEP");
  settings.keep_timeout_s = config.Float("BYTEPS_KEEP_TIMEOUT_S");
  settings.replace_servers_s = config.Float("BYTEPS_REPLACE_SERVERS_S");
  settings.backups = config.Bool("BYTEPS_BACKUP_STATE");
  settings.scheduler_return_s = config.Float("BYTEPS_SCHEDULER_RETURN_S");
  return settings;
}

rdma::Settings RdmaOf(const Config& config) {
  rdma::Settings settings;
  settings.choice = RdmaChoice::Parse(config.String("BYTEPS_RDMA_DEVICE"));
  settings.traffic_class = Int(config, "BYTEPS_RDMA_TRAFFIC_CLASS");
  settings.mtu = std::stoi(config.String("BYTEPS_RDMA_MTU"));
  settings.send_depth = settings.send_depth_set = Int(config, "BYTEPS_RDMA_START_DEPTH");
  settings.receive_depth = settings.receive_depth_set = Int(config, "BYTEPS_RDMA_RX_DEPTH");
  settings.all_slots_bytes = config.Int("BYTEPS_RDMA_SLOT_BYTES");
  settings.inline_bytes = Int(config, "BYTEPS_RDMA_INLINE_BYTES");
  settings.pool_bytes = config.Int("BYTEPS_RDMA_POOL_BYTES");
  settings.window_bytes = config.Int("BYTEPS_RDMA_WINDOW_BYTES");
  settings.receive_window_bytes = config.Int("BYTEPS_RDMA_RECEIVE_WINDOW_BYTES");
  settings.busy_poll = config.Bool("BYTEPS_RDMA_BUSY_POLL");
  settings.data_plane = config.Bool("BYTEPS_RDMA_DATA_PLANE");
  settings.data_endpoints = std::max(Int(config, "BYTEPS_CONNECTIONS"), 1);
  settings.start_timeout_s = config.Float("BYTEPS_START_TIMEOUT_S");
  settings.reconnect_s = config.Float("BYTEPS_RECONNECT_TIMEOUT_S");
  return settings;
}

Role RoleOf(const Config& config) {
  const std::string& name = config.String("DMLC_ROLE");
  if (name == "scheduler") return Role::kScheduler;
  return name == "server" ? Role::kServer : Role::kWorker;
}

}  // namespace

NetSettings NetSettings::From(const Config& config) {
  NetSettings settings;
  settings.role = RoleOf(config);
  settings.transport = config.String("DMLC_ENABLE_RDMA");
  settings.verbose = Int(config, "PS_VERBOSE");

  VanSettings& van = settings.van;
  van.scheduler_host = config.String("DMLC_PS_ROOT_URI");
  van.scheduler_port = Int(config, "DMLC_PS_ROOT_PORT");
  van.on_every_address = config.Bool("DMLC_USE_KUBERNETES");
  van.host = config.String("DMLC_NODE_HOST");
  van.interface = config.String("DMLC_INTERFACE");
  van.port = Int(config, "BYTEPS_NODE_PORT");
  van.reconnect_s = config.Float("BYTEPS_RECONNECT_TIMEOUT_S");
  van.nics = NicSettings::From(config);
  van.membership = MembershipOf(config, settings.role);

  settings.tcp.io_threads = Int(config, "BYTEPS_IO_THREADS");
  settings.tcp.connections = Int(config, "BYTEPS_CONNECTIONS");
  settings.tcp.receive_pool_bytes = config.Int("BYTEPS_RECEIVE_POOL_BYTES");
  settings.rdma = RdmaOf(config);
  settings.tcp.secret = settings.rdma.secret = SecretOf(config);
  settings.tcp.tls = tls::Context::Make(TlsOf(config), settings.tcp.secret);
  return settings;
}

void NetSettings::LimitStartTimeout(double seconds) {
  const double least = std::min(van.membership.start_timeout_s, seconds);
  van.membership.start_timeout_s = rdma.start_timeout_s = least;
}

}  // namespace ps
