#include "byteps/net/net_settings.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "byteps/base/config.h"
#include "byteps/base/invariant.h"
#include "tests/support/kit.h"

namespace ps {
namespace {

using byteps::core::Config;
using byteps::core::ConfigWith;
using byteps::core::GivenSettings;
using byteps::core::Role;

constexpr char kSecret[] = "sixteen bytes and more";

NetSettings SettingsWith(GivenSettings given) {
  given.emplace("BYTEPS_SECRET", kSecret);
  return NetSettings::From(ConfigWith(given));
}

// Expects an error that contains `words` for these settings.
void ExpectRefused(const GivenSettings& given, const std::string& words) {
  try {
    NetSettings::From(ConfigWith(given));
    FAIL() << "nothing was refused: " << words;
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
  }
}

TEST(NetSettingsTest, MembershipAndVanHaveTheValuesOfTheTable) {
  const NetSettings settings = SettingsWith({{"DMLC_ROLE", "scheduler"},
                                             {"DMLC_PS_ROOT_URI", "10.0.0.1"},
                                             {"DMLC_PS_ROOT_PORT", "1234"},
                                             {"DMLC_NUM_WORKER", "5"},
                                             {"DMLC_NUM_SERVER", "3"},
                                             {"DMLC_WORKER_ID", "4"},
                                             {"DMLC_INTERFACE", "eth7"},
                                             {"BYTEPS_NODE_PORT", "77"},
                                             {"BYTEPS_PEER_TIMEOUT_S", "1.5"},
                                             {"BYTEPS_START_TIMEOUT_S", "2.5"},
                                             {"BYTEPS_RECONNECT_TIMEOUT_S", "3.5"},
                                             {"BYTEPS_LINK_GBPS", "0.25"},
                                             {"BYTEPS_KEEP", "1"},
                                             {"BYTEPS_LOCAL_RANK", "2"},
                                             {"LOCAL_WORLD_SIZE", "8"}});
  EXPECT_EQ(settings.role, Role::kScheduler);
  const VanSettings& van = settings.van;
  EXPECT_EQ(van.scheduler_host, "10.0.0.1");
  EXPECT_EQ(van.scheduler_port, 1234);
  EXPECT_EQ(van.interface, "eth7");
  EXPECT_EQ(van.port, 77);
  EXPECT_EQ(van.reconnect_s, 3.5);
  EXPECT_TRUE(van.nics.names_address);
  EXPECT_EQ(van.nics.local_rank, 2);
  EXPECT_EQ(van.nics.local_size, 8);
  const MembershipSettings& membership = van.membership;
  EXPECT_TRUE(membership.is_scheduler);
  EXPECT_EQ(membership.workers, 5);
  EXPECT_EQ(membership.servers, 3);
  EXPECT_EQ(membership.rank, 4);
  EXPECT_EQ(membership.peer_timeout_s, 1.5);
  EXPECT_EQ(membership.start_timeout_s, 2.5);
  EXPECT_EQ(membership.link_mbps, 250);
  EXPECT_TRUE(membership.keep);
  EXPECT_FALSE(membership.backups);
}

TEST(NetSettingsTest, TransportsHaveTheValuesOfTheTable) {
  const NetSettings settings = SettingsWith({{"DMLC_ENABLE_RDMA", "ibverbs"},
                                             {"BYTEPS_IO_THREADS", "6"},
                                             {"BYTEPS_CONNECTIONS", "7"},
                                             {"BYTEPS_RECEIVE_POOL_BYTES", "12345678901"},
                                             {"BYTEPS_RDMA_DEVICE", "mlx5_9:2"},
                                             {"BYTEPS_RDMA_MTU", "2048"},
                                             {"BYTEPS_RDMA_POOL_BYTES", "12345678902"},
                                             {"BYTEPS_RDMA_DATA_PLANE", "0"},
                                             {"BYTEPS_START_TIMEOUT_S", "9"}});
  EXPECT_EQ(settings.transport, "ibverbs");
  EXPECT_EQ(settings.tcp.io_threads, 6);
  EXPECT_EQ(settings.tcp.connections, 7);
  EXPECT_EQ(settings.tcp.receive_pool_bytes, 12345678901u);
  EXPECT_TRUE(settings.tcp.secret.is_there());
  EXPECT_EQ(settings.tcp.tls, nullptr);
  EXPECT_EQ(settings.rdma.choice.device, "mlx5_9");
  EXPECT_EQ(settings.rdma.choice.port, 2);
  EXPECT_EQ(settings.rdma.mtu, 2048);
  EXPECT_EQ(settings.rdma.pool_bytes, 12345678902u);
  EXPECT_FALSE(settings.rdma.data_plane);
  EXPECT_EQ(settings.rdma.data_endpoints, 7);
  EXPECT_EQ(settings.rdma.start_timeout_s, 9);
  EXPECT_TRUE(settings.rdma.secret.is_there());
  EXPECT_TRUE(settings.van.nics.uses_rdma);
  EXPECT_TRUE(settings.van.nics.chooses_rdma_device);
}

TEST(NetSettingsTest, WithoutVariablesTheDefaultsOfTheTableApply) {
  const NetSettings settings = SettingsWith({});
  EXPECT_EQ(settings.transport, "tcp");
  EXPECT_FALSE(settings.van.nics.names_address);
  EXPECT_FALSE(settings.van.nics.chooses_rdma_device);
  EXPECT_EQ(settings.van.nics.names, "auto");
  EXPECT_EQ(settings.van.nics.local_size, 1);
  EXPECT_EQ(settings.rdma.send_depth, 64u);
  EXPECT_EQ(settings.rdma.receive_depth, 128u);
  EXPECT_EQ(settings.rdma.data_endpoints, 1);
}

TEST(NetSettingsTest, TwoNodesOfOneProcessHaveDifferentSettings) {
  const NetSettings one = SettingsWith({{"BYTEPS_NODE_PORT", "1"}, {"BYTEPS_IO_THREADS", "1"}});
  const NetSettings other = SettingsWith({{"BYTEPS_NODE_PORT", "2"}, {"BYTEPS_IO_THREADS", "2"}});
  EXPECT_EQ(one.van.port, 1);
  EXPECT_EQ(one.tcp.io_threads, 1);
  EXPECT_EQ(other.van.port, 2);
  EXPECT_EQ(other.tcp.io_threads, 2);
}

TEST(NetSettingsTest, TheStartMayTakeNoLongerThanTheLimit) {
  NetSettings settings = SettingsWith({{"BYTEPS_START_TIMEOUT_S", "9"}});
  settings.LimitStartTimeout(20);
  EXPECT_EQ(settings.van.membership.start_timeout_s, 9);
  settings.LimitStartTimeout(5);
  EXPECT_EQ(settings.van.membership.start_timeout_s, 5);
  EXPECT_EQ(settings.rdma.start_timeout_s, 5);
}

TEST(NetSettingsTest, SecretAndEncryptionAreCheckedTogether) {
  ExpectRefused({}, "BYTEPS_SECRET_FILE");
  ExpectRefused({{"BYTEPS_SECRET", "short"}}, "needs 16");
  ExpectRefused({{"BYTEPS_SECRET", kSecret}, {"BYTEPS_SECRET_FILE", "/there"}}, "both set");
  ExpectRefused({{"BYTEPS_SECRET_FILE", "/not/there"}}, "cannot be read");
  ExpectRefused({{"BYTEPS_SECRET", kSecret}, {"BYTEPS_TLS_CA", "/ca"}}, "BYTEPS_TLS=0");
  ExpectRefused({{"BYTEPS_SECRET", kSecret}, {"BYTEPS_TLS", "1"}, {"BYTEPS_TLS_CA", "/ca"}},
                "go together");
  ExpectRefused({{"BYTEPS_AUTH", "0"}, {"BYTEPS_TLS", "1"}}, "needs the job's secret");
  EXPECT_FALSE(NetSettings::From(ConfigWith({{"BYTEPS_AUTH", "0"}})).tcp.secret.is_there());
}

TEST(NetSettingsTest, AGivenValueGoesBeforeTheEnvironmentAndIsChecked) {
  setenv("BYTEPS_NODE_PORT", "5", 1);
  EXPECT_EQ(SettingsWith({}).van.port, 5);
  EXPECT_EQ(SettingsWith({{"BYTEPS_NODE_PORT", "6"}}).van.port, 6);
  unsetenv("BYTEPS_NODE_PORT");
  const Config config = ConfigWith({{"BYTEPS_NODE_PORT", "6"}});
  EXPECT_TRUE(config.IsSet("BYTEPS_NODE_PORT"));
  EXPECT_FALSE(config.IsSet("BYTEPS_IO_THREADS"));
  ExpectRefused({{"BYTEPS_NODE_PORT", "6x"}}, "BYTEPS_NODE_PORT='6x' is not allowed");
  EXPECT_THROW(ConfigWith({{"BYTEPS_GPU", "0000:1b:00.0"}}), std::logic_error);
}

}  // namespace
}  // namespace ps
