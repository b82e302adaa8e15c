// A message's meta on the wire.
#include "byteps/net/link/meta_codec.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "byteps/net/link/nics.h"
#include "ps/internal/message.h"

namespace byteps {
namespace core {
namespace {

// Fills memory, and keeps the compiler from leaving that out before an object is made there.
void Leave(char value, char* memory, size_t bytes) {
  memset(memory, value, bytes);
  asm volatile("" : : "r"(memory) : "memory");
}

// Of a message made in memory that holds what somebody left there.  `fill` gives the members that
// its sender knows.
template <typename Fill>
std::string EncodedFrom(char left_there, Fill fill) {
  alignas(ps::Meta) char memory[sizeof(ps::Meta)];
  Leave(left_there, memory, sizeof(memory));
  auto* const meta = new (memory) ps::Meta;
  fill(meta, left_there);
  std::string bytes = ps::EncodeMeta(*meta);
  meta->~Meta();
  return bytes;
}

ps::Node NodeFrom(char left_there) {
  alignas(ps::Node) char memory[sizeof(ps::Node)];
  Leave(left_there, memory, sizeof(memory));
  auto* const node = new (memory) ps::Node;
  ps::Node copy = *node;
  node->~Node();
  copy.id = 9;
  copy.port = 1234;
  copy.hostname = "host";
  copy.endpoint_name_len = 8;  // of which the sender wrote nothing
  return copy;
}

// The wire shows nothing of the sender's memory: equal messages are equal bytes, whatever their
// senders leave unsaid.
TEST(Meta, SendsNothingThatNobodyWrote) {
  const auto heartbeat = [](ps::Meta* meta, char) {
    meta->control.cmd = ps::Control::HEARTBEAT;
    meta->body = "report";
  };
  EXPECT_EQ(EncodedFrom('\xa5', heartbeat), EncodedFrom('\x5a', heartbeat));
  const auto add_node = [](ps::Meta* meta, char left_there) {
    meta->control.cmd = ps::Control::ADD_NODE;
    meta->control.node.push_back(NodeFrom(left_there));
  };
  EXPECT_EQ(EncodedFrom('\xa5', add_node), EncodedFrom('\x5a', add_node));
}

ps::Meta WithNics(const std::vector<ps::Nic>& nics) {
  ps::Meta meta;
  meta.control.cmd = ps::Control::ADD_NODE;
  ps::Node node;
  node.id = 8;
  node.port = 1234;
  node.hostname = "10.0.0.2";
  node.nics = nics;
  meta.control.node = {node, node};
  return meta;
}

TEST(Meta, TellsOfTheNicsOfANode) {
  const std::string bytes =
      ps::EncodeMeta(WithNics({{"10.0.0.2", 24, 100'000}, {"fd00::2", 64, 0}}));
  ps::Meta meta;
  ASSERT_TRUE(ps::DecodeMeta(bytes.data(), bytes.size(), &meta));
  ASSERT_EQ(meta.control.node.size(), 2U);
  const auto& nics = meta.control.node[1].nics;
  ASSERT_EQ(nics.size(), 2U);
  EXPECT_EQ(nics[0].address, "10.0.0.2");
  EXPECT_EQ(nics[0].prefix, 24);
  EXPECT_EQ(nics[0].mbps, 100'000);
  EXPECT_EQ(nics[1].address, "fd00::2");
  EXPECT_EQ(nics[1].prefix, 64);
  EXPECT_EQ(nics[1].mbps, 0);
}

TEST(Meta, RefusesNicsThatCannotBe) {
  for (const ps::Nic& nic : {ps::Nic{"", 24, 0}, ps::Nic{"10.0.0.2 ", 24, 0},
                             ps::Nic{"10.0.0.2", 129, 0}, ps::Nic{"10.0.0.2", 24, -1}}) {
    const std::string bytes = ps::EncodeMeta(WithNics({nic}));
    ps::Meta meta;
    EXPECT_FALSE(ps::DecodeMeta(bytes.data(), bytes.size(), &meta)) << nic.address;
  }
  // More than there may be are not sent.
  const std::string bytes = ps::EncodeMeta(WithNics(std::vector<ps::Nic>(99, {"10.0.0.2", 24, 0})));
  ps::Meta meta;
  ASSERT_TRUE(ps::DecodeMeta(bytes.data(), bytes.size(), &meta));
  EXPECT_EQ(meta.control.node[0].nics.size(), ps::kMostNics);
}

}  // namespace
}  // namespace core
}  // namespace byteps
