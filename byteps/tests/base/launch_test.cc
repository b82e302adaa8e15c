// What a launcher says of a worker, and of the replica that it belongs to.
#include <gtest/gtest.h>

#include <string>

#include "byteps/base/error.h"
#include "tests/support/settings.h"

namespace byteps {
namespace core {
namespace {

Launch From(const Settings& settings) { return Launch::From(ConfigWith(settings)); }

std::string ErrorOf(const Settings& settings) {
  try {
    From(settings);
  } catch (const UsageError& e) {
    return e.what();
  }
  return "";
}

TEST(Launch, IsTheLaunchersOrOurs) {
  EXPECT_EQ(From({}).size, 1);
  const Launch launch = From({{"RANK", "2"}, {"WORLD_SIZE", "3"}, {"DMLC_NUM_WORKER", "3"}});
  EXPECT_EQ(launch.rank, 2);
  EXPECT_EQ(launch.size, 3);
  EXPECT_EQ(launch.replicas, 1);
  EXPECT_EQ(ErrorOf({{"WORLD_SIZE", "3"}, {"DMLC_NUM_WORKER", "4"}}),
            "WORLD_SIZE=3 and DMLC_NUM_WORKER=4 disagree; unset DMLC_NUM_WORKER");
}

TEST(Launch, OurPlaceOnTheHostComesBeforeTheLaunchers) {
  Settings settings = {{"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}};
  EXPECT_EQ(From(settings).local_rank, 1);
  EXPECT_EQ(From(settings).local_size, 2);
  settings.insert({{"BYTEPS_LOCAL_RANK", "3"}, {"BYTEPS_LOCAL_SIZE", "4"}});
  EXPECT_EQ(From(settings).local_rank, 3);
  EXPECT_EQ(From(settings).local_size, 4);
}

TEST(Launch, RanksOfReplicasFollowEachOther) {
  for (const Settings& all : {Settings(), Settings{{"DMLC_NUM_WORKER", "8"}}}) {
    Settings settings = {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"BYTEPS_REPLICA", "3/4"}};
    settings.insert(all.begin(), all.end());
    const Launch launch = From(settings);
    EXPECT_EQ(launch.replica, 3);
    EXPECT_EQ(launch.replicas, 4);
    EXPECT_EQ(launch.rank, 7);
    EXPECT_EQ(launch.size, 8);
  }
}

TEST(Launch, ReplicasThatCannotBeAreRefused) {
  for (const std::string text : {"4/4", "-1/4", "1", "1/", "a/4", "1/4x", "0/0", "0/5000"}) {
    EXPECT_EQ(ErrorOf({{"BYTEPS_REPLICA", text}}),
              "BYTEPS_REPLICA='" + text +
                  "' is not NUMBER/COUNT: 0/4, 1/4, 2/4 and 3/4 are four replicas");
  }
  EXPECT_EQ(ErrorOf({{"BYTEPS_REPLICA", "0/3"}, {"WORLD_SIZE", "2"}, {"DMLC_NUM_WORKER", "4"}}),
            "DMLC_NUM_WORKER=4 is not 3 replicas (BYTEPS_REPLICA) of equal size, WORLD_SIZE=2");
}

}  // namespace
}  // namespace core
}  // namespace byteps
