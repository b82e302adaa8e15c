// How tensors are cut and dealt, and what is told of them.
#include "byteps/engine/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "byteps/base/declaration_list.h"
#include "byteps/base/error.h"
#include "byteps/engine/placement.h"
#include "settings.h"

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

TEST(Plan, TooLargeForItsPartitionsSaysWhatToRaise) {
  const Plan plan = PlanOf(0, 1, 1, {{"BYTEPS_PARTITION_BYTES", "4096"}});
  try {
    plan.Declare(SpecOf("large", 4096ull * 65537));
    FAIL() << "was accepted";
  } catch (const UsageError& e) {
    EXPECT_NE(std::string(e.what()).find("raise BYTEPS_PARTITION_BYTES"), std::string::npos);
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

TEST(Plan, BuiltInHashIsTheSameInEveryBuild) {
  // FNV-1a of "65536" and "65537", modulo 1000, worked out apart from this code.
  EXPECT_EQ(ServerOf(KeyHash::kBuiltIn, 65536, 0, 0, 1000), 202);
  EXPECT_EQ(ServerOf(KeyHash::kBuiltIn, 65536, 0, 1, 1000), 413);
}

std::vector<Declaration> SomeDeclarations() {
  std::vector<Declaration> all;
  for (int i = 0; i < 7; ++i) {
    Declaration d;
    d.name = std::string(i, 'x') + "\0\xff" + std::to_string(i);
    d.dtype = static_cast<DType>(i);
    d.average = i % 2 == 0;
    d.fused = false;
    d.hash = KeyHash::kSdbm;
    d.bytes = 800 * (i + 1);
    d.partition_bytes = 4096;
    d.placement = 0x1122334455667788 + i;
    d.group = i % 3 == 0 ? std::vector<uint32_t>{0, 1, 70000} : std::vector<uint32_t>{5, 6};
    all.push_back(d);
  }
  return all;
}

TEST(DeclarationList, ComesBackAsItWas) {
  const auto all = SomeDeclarations();
  std::vector<Declaration> back;
  std::string error;
  ASSERT_TRUE(UnpackDeclarations(PackDeclarations(all), &back, &error)) << error;
  ASSERT_EQ(back.size(), all.size());
  for (size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(back[i] == all[i]) << i;
}

TEST(DeclarationList, IsLittleEndianAndHasEachGroupOnce) {
  auto all = SomeDeclarations();
  const std::string text = PackDeclarations(all);
  EXPECT_EQ(text[0], 1);                                            // version
  EXPECT_EQ(text[1], 4);                                            // sdbm
  EXPECT_EQ(text.substr(3, 4), std::string("\2\0\0\0", 4));         // groups
  EXPECT_EQ(text.substr(7, 4), std::string("\3\0\0\0", 4));         // members of the first
  EXPECT_EQ(text.substr(19, 4), std::string("\x70\x11\x01\0", 4));  // 70000
}

TEST(DeclarationList, EveryTruncationAndAdditionIsRefused) {
  const std::string text = PackDeclarations(SomeDeclarations());
  std::vector<Declaration> back;
  std::string error;
  for (size_t size = 0; size < text.size(); ++size) {
    EXPECT_FALSE(UnpackDeclarations(text.substr(0, size), &back, &error)) << size;
    EXPECT_EQ(error, "does not parse");
  }
  EXPECT_FALSE(UnpackDeclarations(text + "x", &back, &error));
}

TEST(DeclarationList, AnotherVersionIsNamed) {
  std::string text = PackDeclarations(SomeDeclarations());
  text[0] = 9;
  std::vector<Declaration> back;
  std::string error;
  EXPECT_FALSE(UnpackDeclarations(text, &back, &error));
  EXPECT_NE(error.find("version 9"), std::string::npos) << error;
}

TEST(DeclarationList, AnyBytesAreTakenOrRefused) {
  const std::string good = PackDeclarations(SomeDeclarations());
  std::mt19937 random(7);
  std::vector<Declaration> back;
  std::string error;
  int refused = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string text = good;
    for (int flips = 1 + random() % 4; flips > 0; --flips) {
      text[random() % text.size()] = static_cast<char>(random());
    }
    if (!UnpackDeclarations(text, &back, &error)) {
      ++refused;
      continue;
    }
    for (const auto& d : back) {
      EXPECT_LE(d.NumPartitions(), kMaxPartitions);
      EXPECT_TRUE(std::is_sorted(d.group.begin(), d.group.end()));
      EXPECT_FALSE(d.group.empty());
    }
  }
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace core
}  // namespace byteps
