// Which connection of a pair a message takes, and whether closing waits for those who send.
#include "byteps/net/link/choice.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "byteps/net/link/van_inbox.h"
#include "link.h"

namespace connection_test {
namespace {

ps::tcp::ConnectionPtr BestOf(const std::vector<ps::tcp::ConnectionPtr>& connections) {
  return ps::BestOf(connections);
}

TEST(BestOf, OneThatIsBrokenOnlyWhereAllAre) {
  Hub hub(false, 1000);
  Link broken(&hub), whole(&hub), other(&hub);
  for (Link* link : {&broken, &whole, &other}) {
    link->Send(true, "one");
    EXPECT_TRUE(WaitUntil([&] { return link->Has({"one"}, {}); })) << link->Text();
  }
  broken.ForgetTheSecret();  // it stays so
  hub.relay.Reset(broken.route, {});
  EXPECT_TRUE(WaitUntil([&] { return !broken.connection()->open(); }));
  EXPECT_EQ(BestOf({broken.connection(), nullptr, whole.connection()}), whole.connection());
  EXPECT_EQ(BestOf({whole.connection(), broken.connection()}), whole.connection());
  EXPECT_EQ(BestOf({nullptr, broken.connection()}), broken.connection());
  EXPECT_EQ(BestOf({nullptr}), nullptr);
  // Of broken ones as well that with fewer bytes.
  other.ForgetTheSecret();
  hub.relay.Reset(other.route, {});
  EXPECT_TRUE(WaitUntil([&] { return !other.connection()->open(); }));
  broken.Send(true, "a long message");
  EXPECT_EQ(BestOf({broken.connection(), other.connection()}), other.connection());
}

TEST(VanInbox, ClosingWaitsForThoseWhoUseIt) {
  ps::VanInbox<int> inbox;
  EXPECT_FALSE(inbox.BeginUse());
  inbox.Open();
  ASSERT_TRUE(inbox.BeginUse());
  std::atomic<bool> closed{false};
  std::thread closes([&] {
    inbox.Close();
    closed = true;
  });
  EXPECT_TRUE(WaitUntil([&] { return !inbox.is_open(); }));
  EXPECT_FALSE(inbox.BeginUse());
  EXPECT_FALSE(closed);
  inbox.EndUse();
  closes.join();
}

}  // namespace
}  // namespace connection_test
