// How tensors are cut and dealt.
#include "byteps/engine/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <utility>

#include "byteps/base/error.h"
#include "byteps/base/placement.h"
#include "tests/support/settings.h"

namespace byteps {
namespace core {
namespace {

Plan PlanOf(int rank, int workers, int servers, const Settings& settings = {}) {
  return Plan(ConfigWith(settings), LaunchOf(rank, workers), servers);
}

TensorSpec SpecOf(const std::string& name, uint64_t bytes) {
  TensorSpec spec;
  spec.name = name;
  spec.bytes = bytes;
  spec.placement = 0;
  return spec;
}

TEST(Plan, NoMorePartitionsThanKeysWithManyServers) {
  const Plan plan = PlanOf(0, 1, 3000);
  const Declaration d = plan.Declare(SpecOf("large", 100'000'000'000));
  EXPECT_LE(d.NumPartitions(), kMaxPartitions);
  EXPECT_GT(d.NumPartitions(), kMaxPartitions / 2);
}

TEST(Plan, PiecesHavePartitionsAsLongAsTheWholeTensors) {
  const Plan plan = PlanOf(0, 1, 4);
  const Declaration whole = plan.Declare(SpecOf("whole", 128 << 20));
  EXPECT_EQ(whole.partition_bytes, 512u << 10);
  TensorSpec spec = SpecOf("piece", 16 << 20);
  spec.piece_of = whole.bytes;
  EXPECT_EQ(plan.Declare(spec).partition_bytes, whole.partition_bytes);
  EXPECT_EQ(plan.Declare(spec).NumPartitions(), whole.NumPartitions() / 8);
  // All of a piece may fit into one.
  spec.bytes = 4096;
  EXPECT_EQ(plan.Declare(spec).NumPartitions(), 1u);
  EXPECT_EQ(plan.BytesPerServer(spec), (std::vector<uint64_t>{4096, 0, 0, 0}));
}

TEST(Plan, PartitionsAreLongerOnAFastLink) {
  Plan plan = PlanOf(0, 1, 2);
  EXPECT_EQ(plan.PartitionBytes(DType::kFloat32, 16 << 20), 128u << 10);
  plan.SetLink(10);
  EXPECT_EQ(plan.PartitionBytes(DType::kFloat32, 16 << 20), 36u * 4096)
      << "8 MiB a server, 2,500 bytes in 2 us";
  plan.SetLink(100);
  EXPECT_EQ(plan.PartitionBytes(DType::kFloat32, 16 << 20), 112u * 4096);
  EXPECT_EQ(plan.PartitionBytes(DType::kFloat32, 4096), 128u << 10)
      << "short tensors have short ones";
  EXPECT_EQ(plan.PartitionBytes(DType::kFloat32, 256 << 20), 2u << 20) << "64 a server are longer";
  EXPECT_EQ(PlanOf(0, 1, 2, {{"BYTEPS_PARTITION_BYTES", "4096"}})
                .PartitionBytes(DType::kFloat32, 16 << 20),
            4096u);
}

TEST(Plan, PartitionsOfBlocksHaveWholeBlocksAndWholePages) {
  constexpr uint64_t kValues = 64 << 20;
  for (const DType type : {DType::kInt8x128, DType::kInt4x128}) {
    const uint64_t bytes = kValues / kBlockValues * SizeOf(type);
    for (const uint64_t size : {SizeOf(type), bytes / 100, bytes, 16 * bytes}) {
      const uint32_t partition = PlanOf(0, 1, 4).PartitionBytes(type, size);
      EXPECT_EQ(partition % SizeOf(type), 0u);
      EXPECT_EQ(partition % 4096, 0u);
    }
    EXPECT_EQ(PlanOf(0, 1, 4).PartitionBytes(type, bytes), bytes / 256) << "64 a server";
    Plan small = PlanOf(0, 1, 1, {{"BYTEPS_PARTITION_BYTES", "4096"}});
    EXPECT_EQ(small.PartitionBytes(type, bytes), 4096 / SizeOf(type) * SizeOf(type));
  }
}

TEST(Plan, PartitionsAreShorterOnASlowLink) {
  Plan plan = PlanOf(0, 1, 4);
  plan.SetLink(0.5);
  EXPECT_EQ(plan.PartitionBytes(DType::kFloat32, 4 << 20), 128u << 10);
  plan.SetLink(0.2);
  EXPECT_EQ(plan.PartitionBytes(DType::kFloat32, 4 << 20), 16u * 4096) << "62,500 bytes in 2.5 ms";
  plan.SetLink(0.01);
  EXPECT_EQ(plan.PartitionBytes(DType::kFloat32, 4 << 20), 32u << 10);
  EXPECT_EQ(plan.PartitionBytes(DType::kFloat32, 64 << 20), 256u << 10) << "64 a server are longer";
  Plan asked = PlanOf(0, 1, 4, {{"BYTEPS_MIN_PARTITION_BYTES", "131072"}});
  asked.SetLink(0.01);
  EXPECT_EQ(asked.PartitionBytes(DType::kFloat32, 4 << 20), 128u << 10);
}

TEST(Plan, TooLargeForItsPartitionsSaysWhatToRaise) {
  const Plan plan = PlanOf(0, 1, 1, {{"BYTEPS_PARTITION_BYTES", "4096"}});
  try {
    plan.Declare(SpecOf("large", 4096ull * 65537));
    FAIL() << "was accepted";
  } catch (const UsageError& e) {
    EXPECT_NE(std::string(e.what()).find("raise BYTEPS_PARTITION_BYTES"), std::string::npos);
  }
}

TEST(Plan, TensorsSayHowLongReplicasWait) {
  Launch launch = LaunchOf(1, 6);
  launch.replicas = 3;
  const Settings both = {{"BYTEPS_QUORUM", "2"}, {"BYTEPS_GRACE_S", "1.5"}};
  const Plan patient(ConfigWith(both), launch, 1);
  EXPECT_TRUE(patient.Declare(SpecOf("a", 4)).patience == (Patience{2, 2, 1500}));
  EXPECT_TRUE(Plan(ConfigWith({}), launch, 1).Declare(SpecOf("a", 4)).patience ==
              (Patience{2, 0, 0}));
  EXPECT_TRUE(PlanOf(1, 6, 1).Declare(SpecOf("a", 4)).patience == Patience());
  const std::pair<Settings, const char*> wrong[] = {
      {{{"BYTEPS_QUORUM", "2"}}, "BYTEPS_QUORUM=2 and BYTEPS_GRACE_S=0: set both"},
      {{{"BYTEPS_GRACE_S", "1.5"}}, "BYTEPS_QUORUM=0 and BYTEPS_GRACE_S=1.5: set both"},
      {{{"BYTEPS_QUORUM", "3"}, {"BYTEPS_GRACE_S", "1"}},
       "BYTEPS_QUORUM=3 must be less than the 3 replicas"},
  };
  for (const auto& [settings, why] : wrong) {
    try {
      const Plan plan(ConfigWith(settings), launch, 1);
      ADD_FAILURE() << why;
    } catch (const UsageError& e) {
      EXPECT_EQ(std::string(e.what()).find(why), 0u) << e.what();
    }
  }
}

TEST(Plan, EachWorkerBeginsWithAServerOfItsOwn) {
  const int servers = 5;
  std::set<int> first;
  for (int rank = 0; rank < servers; ++rank) {
    const Plan plan = PlanOf(rank, servers, servers, {{"BYTEPS_PARTITION_BYTES", "4096"}});
    const Plan::Layout layout = plan.LayOut(plan.Declare(SpecOf("x", 4096 * 23)));
    ASSERT_EQ(layout.order.size(), 23u);
    first.insert(layout.servers[layout.order[0]]);
    std::set<uint32_t> all(layout.order.begin(), layout.order.end());
    EXPECT_EQ(all.size(), 23u);
    // A round of dealing is over before the next one begins, and gives each server one.
    for (size_t begin = 0; begin < 20; begin += servers) {
      std::set<int> round;
      for (int i = 0; i < servers; ++i) round.insert(layout.servers[layout.order[begin + i]]);
      EXPECT_EQ(round.size(), 5u);
      for (int i = 0; i < servers; ++i)
        EXPECT_EQ(layout.order[begin + i] / servers, begin / servers);
    }
  }
  EXPECT_EQ(first.size(), 5u);
}

TEST(Plan, HashesAreTheSameInEveryBuild) {
  // djb2 of "65536" and "65537", modulo 1000, worked out apart from this code.
  EXPECT_EQ(ServerOf(KeyHash::kDjb2, 65536, 0, 0, 1000), 582);
  EXPECT_EQ(ServerOf(KeyHash::kDjb2, 65536, 0, 1, 1000), 583);
  // Round robin from the placement.
  EXPECT_EQ(ServerOf(KeyHash::kRaw, 65536, 7, 5, 5), 2);
}

}  // namespace
}  // namespace core
}  // namespace byteps
