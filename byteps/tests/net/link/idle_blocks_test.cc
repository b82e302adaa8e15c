// Which blocks of memory are kept to be used again.
#include "byteps/net/link/idle_blocks.h"

#include <gtest/gtest.h>

#include <vector>

namespace ps {
namespace {

TEST(IdleBlocks, OneOfTheSameSizeIsUsedAgain) {
  IdleBlocks<int*> idle(100);
  int one = 0, other = 0;
  int* block = nullptr;
  EXPECT_FALSE(idle.Take(10, &block));
  EXPECT_TRUE(idle.Keep(10, &one));
  EXPECT_TRUE(idle.Keep(20, &other));
  EXPECT_FALSE(idle.Take(30, &block));
  ASSERT_TRUE(idle.Take(10, &block));
  EXPECT_EQ(block, &one);
  EXPECT_FALSE(idle.Take(10, &block)) << "once";
  EXPECT_EQ(idle.TakeAll(), std::vector<int*>({&other}));
}

TEST(IdleBlocks, NoMoreIsKeptThanTheLimit) {
  IdleBlocks<int*> idle(100);
  int any = 0;
  EXPECT_TRUE(idle.Keep(60, &any));
  EXPECT_FALSE(idle.Keep(41, &any));
  EXPECT_TRUE(idle.Keep(40, &any));
  int* block = nullptr;
  EXPECT_TRUE(idle.Take(60, &block));
  EXPECT_TRUE(idle.Keep(41, &any)) << "there is room again";
}

}  // namespace
}  // namespace ps
