// What a listener takes from a peer that has not authenticated, and what it shows of it.
#include "byteps/net/tcp/greeter.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "byteps/base/text.h"

namespace ps {
namespace tcp {
namespace {

class GreeterTest : public testing::Test {
 protected:
  GreeterTest() {
    int both[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, both), 0);
    peer_ = Fd(both[0]);
    other_ = Fd(dup(both[1]));
    host_.secret = &secret_;
    host_.challenge = [](const Hello&) { return Challenge(); };
    host_.admit = [](const StreamPtr&, const Hello&) { return ""; };
    host_.done = [this](const Greeter*) { done_ = true; };
    greeter_ = std::make_shared<Greeter>(&host_, std::make_shared<Poller>(0), Fd(both[1]));
  }

  // As much as the kernel holds.
  size_t SayJunk() {
    const std::string junk(1 << 16, '\xff');
    size_t bytes = 0;
    for (ssize_t n; (n = send(peer_.get(), junk.data(), junk.size(), MSG_NOSIGNAL)) > 0;) {
      bytes += n;
    }
    return bytes;
  }

  size_t Unread() const {
    int bytes = 0;
    EXPECT_EQ(ioctl(other_.get(), FIONREAD, &bytes), 0);
    return bytes;
  }

  auth::Secret secret_;
  Greeter::Host host_;
  Fd peer_;
  Fd other_;  // the greeter's end, for what waits there
  std::shared_ptr<Greeter> greeter_;
  bool done_ = false;
};

TEST_F(GreeterTest, APeerThatIsRefusedIsReadLittleByLittle) {
  const size_t said = SayJunk();
  ASSERT_GT(said, 100'000u);
  EXPECT_TRUE(greeter_->OnReady(EPOLLIN));
  EXPECT_GT(Unread(), said - 40'000);
  EXPECT_TRUE(greeter_->answered());
  char answer[4096];
  const ssize_t n = recv(peer_.get(), answer, sizeof(answer), 0);
  EXPECT_NE(std::string(answer, n).find("does not speak this protocol"), std::string::npos);
}

TEST_F(GreeterTest, APeerThatNeverStopsIsClosed) {
  size_t said = 0;
  while (!done_ && said < 64 << 20) {
    said += SayJunk();
    while (greeter_->OnReady(0)) continue;
  }
  EXPECT_TRUE(done_);
  EXPECT_LT(said, 1u << 20);
}

TEST_F(GreeterTest, APeerThatIsRefusedAndCloses) {
  SayJunk();
  while (greeter_->OnReady(EPOLLIN)) continue;
  if (!done_) {
    peer_.Close();
    while (greeter_->OnReady(EPOLLIN)) continue;
  }
  EXPECT_TRUE(done_);
}

TEST(ForeignText, IsQuotedPrintableAndShort) {
  EXPECT_EQ(ForeignText("a job's secret"), "\"a job's secret\"");
  EXPECT_EQ(ForeignText("\x1b[2J\nERROR \"x\" \xff\\"),
            "\"\\x1b[2J\\x0aERROR \\x22x\\x22 \\xff\\x5c\"");
  EXPECT_EQ(ForeignText(std::string(1000, 'x'), 3), "\"xxx\"...");
  EXPECT_EQ(ForeignText(std::string("\0", 1)), "\"\\x00\"");
}

}  // namespace
}  // namespace tcp
}  // namespace ps
