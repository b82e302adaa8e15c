// Tests of messages that pass through ps-lite, and of its arrays.
#include "byteps/cluster/ps_message.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/cluster/channel.h"
#include "byteps/cluster/ps_message.h"
#include "ps/sarray.h"

namespace byteps {
namespace core {
namespace {

SharedBytes Text(const std::string& text) {
  const SharedBytes bytes = SharedBytes::New(text.size());
  memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

TEST(PsMessage, ARequestComesAsItWasSent) {
  Message request = MakeRequest(kPushPull, 3, 0x1234'5678'0000'0007, 99, "header");
  request.SetValues(Text("values"));
  EXPECT_TRUE(ToPs(request).answer.empty());
  char place[5];
  request.place = place;
  request.place_bytes = sizeof(place);
  ps::Message carried = ToPs(request);
  EXPECT_EQ(carried.answer.data(), place);
  EXPECT_EQ(carried.answer.size(), sizeof(place));
  EXPECT_EQ(carried.meta.recver, ServerId(3));
  EXPECT_EQ(carried.data.at(0).data(), request.values.data()) << "the values were copied";
  EXPECT_FALSE(carried.meta.simple_app);
  carried.meta.sender = WorkerId(5);
  const Message came = FromPs(&carried, Role::kServer);
  EXPECT_EQ(came.op, kPushPull);
  EXPECT_TRUE(came.is_request);
  EXPECT_FALSE(came.failed);
  EXPECT_EQ(came.peer, 5);
  EXPECT_FALSE(came.between_servers);
  EXPECT_EQ(came.key, request.key);
  EXPECT_EQ(came.number, 99u);
  EXPECT_EQ(came.body, "header");
  EXPECT_EQ(came.values.data(), request.values.data());
  EXPECT_EQ(came.sent_bytes, 6u);
}

TEST(PsMessage, AnAnswerSaysWhetherItFailed) {
  for (const char* error : {"", "it is over"}) {
    ps::Message carried = ToPs(MakeAnswer(kDeclare, 2, 16, 7, error));
    EXPECT_EQ(carried.meta.recver, WorkerId(2));
    EXPECT_TRUE(carried.meta.simple_app) << "declarations go by the plane of control";
    carried.meta.sender = ServerId(1);
    const Message came = FromPs(&carried, Role::kWorker);
    EXPECT_FALSE(came.is_request);
    EXPECT_EQ(came.failed, *error != 0);
    EXPECT_EQ(came.body, error);
    EXPECT_EQ(came.peer, 1);
    EXPECT_FALSE(came.between_servers);
    EXPECT_EQ(came.sent_bytes, 0u);
  }
}

TEST(PsMessage, ServersSendEachOtherRequestsAndAnswers) {
  for (const bool is_request : {true, false}) {
    Message message = MakeRequest(kPushPull, 3, 16, 99, "header");
    message.is_request = is_request;
    message.between_servers = true;
    message.SetValues(Text("values"));
    ps::Message carried = ToPs(message);
    EXPECT_EQ(carried.meta.recver, ServerId(3));
    carried.meta.sender = ServerId(2);
    const MessageHead head = HeadOf(carried.meta, Role::kServer);
    EXPECT_TRUE(head.between_servers);
    EXPECT_EQ(head.peer, 2);
    const Message came = FromPs(&carried, Role::kServer);
    EXPECT_TRUE(came.between_servers);
    EXPECT_EQ(came.is_request, is_request);
    EXPECT_EQ(came.values.size(), 6u);
    // A node interprets a message by its own role, so a worker would take the message for a
    // server's answer.
    EXPECT_FALSE(HeadOf(carried.meta, Role::kWorker).between_servers);
  }
}

// Dropped values arrive as a single empty value with the size (net/link/registration_cache.h).
TEST(PsMessage, DroppedValuesTellTheirSize) {
  ps::Message carried = ToPs(MakeRequest(kPushPull, 0, 16, 1, ""));
  carried.data.emplace_back();
  carried.meta.data_size = 4096;
  const Message came = FromPs(&carried, Role::kServer);
  EXPECT_TRUE(came.values.empty());
  EXPECT_EQ(came.sent_bytes, 4096u);
}

TEST(PsMessage, ValuesInPiecesHaveNoSizeThatAnybodyExpects) {
  ps::Message carried = ToPs(MakeRequest(kPushPull, 0, 16, 1, ""));
  for (int i = 0; i < 2; ++i) carried.AddData(ps::SArray<char>(8, 'x'));
  const Message came = FromPs(&carried, Role::kServer);
  EXPECT_TRUE(came.values.empty());
  EXPECT_EQ(came.sent_bytes, Message::kInPieces);
}

// The sender learns that its values were sent once the last copy of them is destroyed.
TEST(PsMessage, ValuesAreHeldAsLongAsAnybodyHasThem) {
  char memory[4];
  int released = 0;
  Message request = MakeRequest(kPushPull, 0, 16, 1, "");
  request.SetValues(SharedBytes::Borrow(memory, sizeof(memory), [&](char*) { ++released; }));
  ps::Message carried = ToPs(request);
  request = Message();
  Message came = FromPs(&carried, Role::kServer);
  carried = ps::Message();
  const SharedBytes part = came.values.Part(1, 2);
  came = Message();
  EXPECT_EQ(released, 0);
  EXPECT_EQ(part.data(), memory + 1);
  SharedBytes moved = part;
  const SharedBytes last = std::move(moved);
  EXPECT_TRUE(moved.empty());  // NOLINT: what a moved-from object is
  EXPECT_EQ(last.size(), 2u);
}

TEST(SharedBytes, AreReleasedOnce) {
  char memory[4];
  int released = 0;
  {
    const SharedBytes all = SharedBytes::Borrow(memory, 4, [&](char*) { ++released; });
    const SharedBytes part = all.Part(2, 2);
  }
  EXPECT_EQ(released, 1);
}

// ----- upstream's arrays share memory when copied, and pass it on when moved

using Array = ps::SArray<char>;

// If these types could throw when moved, a vector would copy its arrays when it grows.
static_assert(std::is_nothrow_move_constructible_v<Array>);
static_assert(std::is_nothrow_move_assignable_v<Array>);

void ExpectEmpty(const Array& array) {
  EXPECT_EQ(array.data(), nullptr);
  EXPECT_EQ(array.size(), 0u);
  EXPECT_EQ(array.capacity(), 0u);
  EXPECT_EQ(array.ptr().use_count(), 0);
}

TEST(SArray, CopyShares) {
  const Array source(100, 'a');
  const Array copy = source;  // NOLINT: a copy is what is tested
  EXPECT_EQ(copy.data(), source.data());
  EXPECT_EQ(copy.size(), 100u);
  EXPECT_EQ(source.ptr().use_count(), 2);
}

TEST(SArray, MoveHandsOver) {
  Array source(100, 'a');
  const char* const memory = source.data();
  Array target = std::move(source);
  EXPECT_EQ(target.data(), memory);
  EXPECT_EQ(target.size(), 100u);
  EXPECT_EQ(target.capacity(), 100u);
  EXPECT_EQ(target.ptr().use_count(), 1);
  ExpectEmpty(source);  // NOLINT: what is left is what is tested
}

TEST(SArray, MoveIntoAnotherFreesItsMemory) {
  Array target(10, 'b');
  const std::weak_ptr<char> before = target.ptr();
  Array source(100, 'a');
  const char* const memory = source.data();
  target = std::move(source);
  EXPECT_TRUE(before.expired());
  EXPECT_EQ(target.data(), memory);
  EXPECT_EQ(target.ptr().use_count(), 1);
  ExpectEmpty(source);  // NOLINT: what is left is what is tested
}

TEST(SArray, MoveIntoItselfChangesNothing) {
  Array array(100, 'a');
  const char* const memory = array.data();
  Array* const itself = &array;
  array = std::move(*itself);
  EXPECT_EQ(array.data(), memory);
  EXPECT_EQ(array.size(), 100u);
  EXPECT_EQ(array.ptr().use_count(), 1);
}

TEST(SArray, GrowingVectorCountsNoReferences) {
  std::vector<Array> arrays;
  arrays.emplace_back(100, 'a');
  const std::weak_ptr<char> memory = arrays.front().ptr();
  arrays.reserve(arrays.capacity() + 100);
  EXPECT_EQ(memory.use_count(), 1);
}

TEST(SArray, MovedFromCanBeUsedAgain) {
  Array source(100, 'a');
  const Array target = std::move(source);
  source.resize(5, 'c');  // NOLINT
  EXPECT_EQ(source.size(), 5u);
  EXPECT_EQ(source[4], 'c');
  EXPECT_EQ(target[4], 'a');
}

}  // namespace
}  // namespace core
}  // namespace byteps
