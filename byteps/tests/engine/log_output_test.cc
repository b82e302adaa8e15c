// Lines of the log reach a reader that is slow, and wait for nobody.
#include "../../3rdparty/ps-lite/src/log_output.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

namespace ps {
namespace {

constexpr size_t kLimit = 64 << 10;
constexpr int kPatienceMs = 60'000;  // against hangs alone

std::string Line(int i) { return "line " + std::to_string(i) + std::string(100, '.') + "\n"; }

std::string Notice(uint64_t dropped) { return "dropped " + std::to_string(dropped) + "\n"; }

// What comes up to the end of the line that has `word`.
std::string ReadUntil(int fd, const std::string& word) {
  std::string all;
  char buffer[4096];
  pollfd item{fd, POLLIN, 0};
  while (all.empty() || all.back() != '\n' || all.find(word) == std::string::npos) {
    if (poll(&item, 1, kPatienceMs) != 1) return all + "(nothing more came)";
    const ssize_t n = read(fd, buffer, sizeof(buffer));
    if (n <= 0) return all + "(closed)";
    all.append(buffer, n);
  }
  return all;
}

class LogOutputTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    const bool pipes = GetParam();
    ASSERT_EQ(pipes ? pipe(ends_) : socketpair(AF_UNIX, SOCK_STREAM, 0, ends_), 0);
    // Never destroyed: see there.
    output_ = new LogOutput(ends_[1], kLimit, Notice);
  }
  int ends_[2];
  LogOutput* output_ = nullptr;
};

TEST_P(LogOutputTest, WhatIsReadComesAtOnce) {
  output_->Write(Line(7));
  EXPECT_EQ(ReadUntil(ends_[0], "line"), Line(7));
  EXPECT_EQ(fcntl(ends_[1], F_GETFL) & O_NONBLOCK, 0) << "others share the descriptor's file";
}

TEST_P(LogOutputTest, NobodyReadsForAWhile) {
  int last = 0;
  // More than any pipe or socket takes, and than may wait.
  constexpr int kLines = 20'000;
  for (; last < kLines; ++last) output_->Write(Line(last));
  output_->Flush(0.01);
  // All that was written first is there, in order; what came after it is counted.
  std::string expected;
  int kept = 0;
  const std::string got = ReadUntil(ends_[0], "dropped");
  const size_t notice = got.rfind("dropped");
  ASSERT_NE(notice, std::string::npos) << got.substr(got.size() - 200);
  for (; expected.size() < notice; ++kept) expected += Line(kept);
  EXPECT_EQ(got.substr(0, notice), expected);
  EXPECT_GE(expected.size(), kLimit);
  EXPECT_LT(kept, kLines);
  EXPECT_EQ(got.substr(notice), Notice(kLines - kept));
  output_->Flush(60);
  output_->Write(Line(last));
  EXPECT_EQ(ReadUntil(ends_[0], "line"), Line(last));
}

TEST_P(LogOutputTest, AChildOwnsNothingThatWaits) {
  for (int i = 0; i < 5000; ++i) output_->Write(Line(i));
  int mine[2];
  ASSERT_EQ(pipe(mine), 0);
  output_->BeforeFork();
  const pid_t child = fork();
  output_->AfterFork(child == 0);
  if (child == 0) {
    dup2(mine[1], ends_[1]);
    output_->Write("from the child\n");
    output_->Flush(60);
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  close(mine[1]);
  EXPECT_EQ(ReadUntil(mine[0], "from"), "from the child\n");
}

INSTANTIATE_TEST_SUITE_P(Ends, LogOutputTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Pipe" : "Socket"; });

}  // namespace
}  // namespace ps
