// A message's meta on the wire.
#include "byteps/net/link/meta_codec.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <string>

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

}  // namespace
}  // namespace core
}  // namespace byteps
