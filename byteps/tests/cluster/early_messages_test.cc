#include "byteps/cluster/early_messages.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "byteps/base/protocol.h"
#include "byteps/cluster/channel.h"
#include "byteps/net/membership/event.h"

namespace byteps {
namespace core {
namespace {

class Hearer : public ChannelUser {
 public:
  void OnMessage(Message* message) override { keys.push_back(message->key); }
  void OnEvent(const ps::MembershipEvent& /*event*/) override {}

  std::vector<uint64_t> keys;
};

TEST(EarlyMessagesTest, WaitForThePlaceAndAreDroppedWithoutOne) {
  EarlyMessages early;
  Hearer hearer;
  const auto come = [&](uint64_t key) {
    Message message = MakeRequest(kDeclare, 0, key, 0, "");
    early.Take(&message, &hearer);
  };
  come(1);
  early.Drop();  // the scheduler died
  come(2);
  EXPECT_TRUE(hearer.keys.empty());
  early.Release(&hearer);
  come(3);
  EXPECT_EQ(hearer.keys, (std::vector<uint64_t>{2, 3}));
}

}  // namespace
}  // namespace core
}  // namespace byteps
