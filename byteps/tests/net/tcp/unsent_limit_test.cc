// How much the kernel may hold of a connection that it has not sent.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>

#include "byteps/net/tcp/socket.h"

namespace ps {
namespace tcp {
namespace {

class UnsentLimitTest : public testing::Test {
 protected:
  UnsentLimitTest() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) { limit_.Begin(fd_); }
  ~UnsentLimitTest() override { close(fd_); }

  // The socket was full for so long, and then took so many bytes.
  void Write(UnsentLimit::Clock::duration full, size_t accepted) {
    limit_.Full(fd_, now_);
    now_ += full;
    limit_.Writable(now_);
    limit_.Accepted(accepted);
    limit_.Full(fd_, now_);
  }

  int OfTheKernel() const {
    int bytes = 0;
    socklen_t length = sizeof(bytes);
    EXPECT_EQ(getsockopt(fd_, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &bytes, &length), 0);
    return bytes;
  }

  const int fd_;
  UnsentLimit limit_;
  UnsentLimit::Clock::time_point now_{std::chrono::hours(1)};
};

constexpr auto kLong = 2 * UnsentLimit::kLong;
constexpr auto kShort = UnsentLimit::kLong / 2;

TEST_F(UnsentLimitTest, GrowsWhereAllWasSentBeforeTheThreadCame) {
  EXPECT_EQ(OfTheKernel(), UnsentLimit::kLeast);
  Write(kShort, UnsentLimit::kLeast / 2);
  EXPECT_EQ(OfTheKernel(), UnsentLimit::kLeast);
  for (int limit = UnsentLimit::kLeast; limit < UnsentLimit::kMost; limit *= 2) {
    Write(kLong, limit);
    EXPECT_EQ(OfTheKernel(), 2 * limit);
  }
  Write(kShort, 2 * UnsentLimit::kMost);
  EXPECT_EQ(OfTheKernel(), UnsentLimit::kMost);
}

TEST_F(UnsentLimitTest, ShrinksWhereHalfOfItTakesLong) {
  for (int i = 0; i < 5; ++i) Write(kShort, UnsentLimit::kMost);
  Write(kShort, UnsentLimit::kMost / 2);
  EXPECT_EQ(OfTheKernel(), UnsentLimit::kMost);
  for (int limit = UnsentLimit::kMost; limit > UnsentLimit::kLeast; limit /= 2) {
    Write(kLong, limit / 2);
    EXPECT_EQ(OfTheKernel(), limit / 2);
  }
  Write(kLong, UnsentLimit::kLeast / 2);
  EXPECT_EQ(OfTheKernel(), UnsentLimit::kLeast);
}

TEST_F(UnsentLimitTest, LearnsNothingAfterAPause) {
  limit_.Full(fd_, now_);
  limit_.Writable(now_);
  limit_.Pause();
  limit_.Accepted(UnsentLimit::kMost);
  limit_.Full(fd_, now_);
  EXPECT_EQ(OfTheKernel(), UnsentLimit::kLeast);
}

TEST_F(UnsentLimitTest, BeginsAnewWithEachSocket) {
  Write(kShort, UnsentLimit::kMost);
  limit_.Begin(fd_);
  EXPECT_EQ(OfTheKernel(), UnsentLimit::kLeast);
}

}  // namespace
}  // namespace tcp
}  // namespace ps
