// Memory that is sent: whose it is, and when.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "link.h"

namespace connection_test {
namespace {

constexpr size_t kBytes = 300'000;

// What a push sends, its answer overwrites.
TEST(Sending, AnAnswerComesToTheMemoryThatWasSent) {
  for (const bool encrypts : {false, true}) {
    Hub hub(encrypts);
    Link link(&hub);
    ps::SArray<char> value(kBytes);
    link.connecting.ReceiveAt(value.data());
    std::vector<std::string> pushed, answered;
    for (int round = 0; round < 20; ++round) {
      pushed.emplace_back(kBytes, static_cast<char>('a' + round));
      memcpy(value.data(), pushed.back().data(), kBytes);
      std::thread([&] { link.Send(true, value); }).join();
      ASSERT_TRUE(WaitUntil([&] { return link.listening.texts() == pushed; })) << link.Text();
      answered.emplace_back(kBytes, static_cast<char>('A' + round));
      link.Send(false, answered.back());
      ASSERT_TRUE(WaitUntil([&] { return link.connecting.texts() == answered; })) << link.Text();
      EXPECT_EQ(std::string(value.data(), kBytes), answered.back());
    }
  }
}

// A mistake, which ThreadSanitizer must see (tests/unit/test_sanitizers.py).
TEST(Sending, DISABLED_MemoryThatChanges) {
  Hub hub(false);
  Link link(&hub);
  ps::SArray<char> value(kBytes);
  memset(value.data(), 1, kBytes);
  link.Send(true, "one");
  ASSERT_TRUE(WaitUntil([&] { return link.Has({"one"}, {}); })) << link.Text();
  std::atomic<bool> sent{false};
  std::thread sends([&] {
    link.Send(true, value);
    sent.store(true, std::memory_order_relaxed);
  });
  // In time it is behind the call; nobody has waited for the message's end.
  while (!sent.load(std::memory_order_relaxed)) continue;
  memset(value.data(), 2, kBytes);
  sends.join();
}

}  // namespace
}  // namespace connection_test
