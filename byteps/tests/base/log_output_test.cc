// Lines of the log reach a reader that is slow, and wait for nobody.
#include "byteps/base/log_output.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

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

// It is never destroyed (see there), and stays where a search for leaks finds it.
LogOutput* NewOutput(int fd) {
  static auto* const all = new std::vector<LogOutput*>;
  all->push_back(new LogOutput(fd, kLimit, Notice));
  return all->back();
}

// A pipe or a connection, and what writes to it.
struct Written {
  explicit Written(bool pipes) {
    EXPECT_EQ(pipes ? pipe(ends) : socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    output = NewOutput(ends[1]);
  }
  int ends[2];
  LogOutput* output;
};

void TryWhatIsReadComesAtOnce(bool pipes) {
  const Written written(pipes);
  written.output->Write(Line(7));
  EXPECT_EQ(ReadUntil(written.ends[0], "line"), Line(7));
  EXPECT_EQ(fcntl(written.ends[1], F_GETFL) & O_NONBLOCK, 0)
      << "others share the descriptor's file";
}

TEST(LogOutputTest, WhatIsReadComesAtOnce) {
  for (const bool pipes : {true, false}) TryWhatIsReadComesAtOnce(pipes);
}

void TryNobodyReadsForAWhile(bool pipes) {
  const Written written(pipes);
  int last = 0;
  // More than any pipe or socket takes, and than may wait.
  constexpr int kLines = 20'000;
  for (; last < kLines; ++last) written.output->Write(Line(last));
  written.output->Flush(0.01);
  // All that was written first is there, in order; what came after it is counted.
  std::string expected;
  int kept = 0;
  const std::string got = ReadUntil(written.ends[0], "dropped");
  const size_t notice = got.rfind("dropped");
  ASSERT_NE(notice, std::string::npos) << got.substr(got.size() - 200);
  for (; expected.size() < notice; ++kept) expected += Line(kept);
  EXPECT_EQ(got.substr(0, notice), expected);
  EXPECT_GE(expected.size(), kLimit);
  EXPECT_LT(kept, kLines);
  EXPECT_EQ(got.substr(notice), Notice(kLines - kept));
  written.output->Flush(60);
  written.output->Write(Line(last));
  EXPECT_EQ(ReadUntil(written.ends[0], "line"), Line(last));
}

TEST(LogOutputTest, NobodyReadsForAWhile) {
  for (const bool pipes : {true, false}) TryNobodyReadsForAWhile(pipes);
}

void TryAChildOwnsNothingThatWaits(bool pipes) {
  const Written written(pipes);
  for (int i = 0; i < 5000; ++i) written.output->Write(Line(i));
  int mine[2];
  ASSERT_EQ(pipe(mine), 0);
  written.output->BeforeFork();
  const pid_t child = fork();
  written.output->AfterFork(child == 0);
  if (child == 0) {
    dup2(mine[1], written.ends[1]);
    written.output->Write("from the child\n");
    written.output->Flush(60);
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  close(mine[1]);
  EXPECT_EQ(ReadUntil(mine[0], "from"), "from the child\n");
}

TEST(LogOutputTest, AChildOwnsNothingThatWaits) {
  for (const bool pipes : {true, false}) TryAChildOwnsNothingThatWaits(pipes);
}

}  // namespace
}  // namespace ps
