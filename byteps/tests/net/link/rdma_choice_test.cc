#include "byteps/net/link/rdma_choice.h"

#include <gtest/gtest.h>

#include <string>

#include "byteps/base/invariant.h"

namespace ps {
namespace {

void ExpectChoice(const std::string& text, const std::string& device, int port, int gid_index) {
  const RdmaChoice choice = RdmaChoice::Parse(text);
  EXPECT_EQ(choice.device, device) << text;
  EXPECT_EQ(choice.port, port) << text;
  EXPECT_EQ(choice.gid_index, gid_index) << text;
}

TEST(RdmaChoiceTest, EachPartMayBeLeftOut) {
  ExpectChoice("", "", 0, -1);
  ExpectChoice("mlx5_0", "mlx5_0", 0, -1);
  ExpectChoice("mlx5_0:2", "mlx5_0", 2, -1);
  ExpectChoice("mlx5_0:2:0", "mlx5_0", 2, 0);
  ExpectChoice("mlx5_0::255", "mlx5_0", 0, 255);
  ExpectChoice(":255", "", 255, -1);
  ExpectChoice("::3", "", 0, 3);
  EXPECT_TRUE(RdmaChoice::Parse("").is_any());
  for (const char* text : {"mlx5_0", ":1", "::0"}) {
    EXPECT_FALSE(RdmaChoice::Parse(text).is_any()) << text;
  }
}

TEST(RdmaChoiceTest, OtherTextIsRefusedByName) {
  for (const std::string text : {"mlx5_0:0", "mlx5_0:256", "mlx5_0:x", "mlx5_0:-1", "mlx5_0:1:256",
                                 "mlx5_0:1:+3", "mlx5_0:1:2:3", "mlx5_0:1 ", "mlx5_0:0001"}) {
    try {
      RdmaChoice::Parse(text);
      ADD_FAILURE() << text << " was taken";
    } catch (const byteps::core::UsageError& e) {
      EXPECT_NE(std::string(e.what()).find("BYTEPS_RDMA_DEVICE='" + text + "' is not"),
                std::string::npos)
          << e.what();
    }
  }
}

}  // namespace
}  // namespace ps
