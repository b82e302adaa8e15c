// Tests of the threads that serve a poller.
#include "byteps/net/tcp/poller.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "byteps/net/tcp/fd.h"

namespace ps {
namespace tcp {
namespace {

// Counts the bytes that come, and the calls from the thread that created it.
class Counts : public Pollable {
 public:
  explicit Counts(Fd fd) : fd_(std::move(fd)) {}

  bool OnReady(uint32_t /*events*/) override {
    EXPECT_FALSE(serving_.exchange(true)) << "calls come one after the other";
    if (std::this_thread::get_id() == maker_) ++by_maker;
    char byte;
    // Reads a single byte, so that there is more to do.
    const bool more = read(fd_.get(), &byte, 1) == 1;
    if (more) ++bytes;
    serving_ = false;
    return more;
  }

  int fd() const { return fd_.get(); }

  std::atomic<int> bytes{0};
  std::atomic<int> by_maker{0};

 private:
  const std::thread::id maker_ = std::this_thread::get_id();
  const Fd fd_;
  std::atomic<bool> serving_{false};
};

class PollerTest : public testing::Test {
 protected:
  PollerTest() {
    int both[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, both), 0);
    peer_ = Fd(both[0]);
    counts_ = std::make_shared<Counts>(Fd(both[1]));
    poller_.Watch(counts_->fd(), counts_);
  }

  void Say(size_t bytes) {
    const std::string text(bytes, 'x');
    ASSERT_EQ(write(peer_.get(), text.data(), bytes), static_cast<ssize_t>(bytes));
  }

  Fd peer_;
  std::shared_ptr<Counts> counts_;
  Poller poller_{0};
};

TEST_F(PollerTest, WhoWaitsServesToo) {
  int said = 0;
  // The poller's thread must wake up first, and this thread is awake. So sooner or later this
  // thread is first.
  while (counts_->by_maker == 0) {
    Say(1);
    for (++said; counts_->bytes < said;) poller_.ServeReady();
  }
  EXPECT_EQ(counts_->bytes, said);
}

TEST_F(PollerTest, WhatIsLeftIsThePollers) {
  for (int said = 0; counts_->by_maker == 0;) {
    Say(3);
    said += 3;
    poller_.ServeReady();
    while (counts_->bytes < said) std::this_thread::yield();
  }
}

TEST_F(PollerTest, NobodyServesWhileAnotherDoes) {
  std::promise<void> begun, go_on;
  poller_.Post([&] {
    begun.set_value();
    go_on.get_future().wait();
  });
  begun.get_future().wait();
  Say(1);
  poller_.ServeReady();
  EXPECT_EQ(counts_->bytes, 0);
  go_on.set_value();
  while (counts_->bytes == 0) std::this_thread::yield();
  EXPECT_EQ(counts_->by_maker, 0);
}

TEST_F(PollerTest, TasksAreThePollers) {
  std::atomic<bool> done{false};
  std::atomic<bool> here{false};
  const auto me = std::this_thread::get_id();
  poller_.Post([&] {
    here = std::this_thread::get_id() == me;
    done = true;
  });
  // This thread may take the wake-up. It must then pass it on.
  while (!done) poller_.ServeReady();
  EXPECT_FALSE(here);
}

}  // namespace
}  // namespace tcp
}  // namespace ps
