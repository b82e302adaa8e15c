// Tests of Outbox and Inbox: which messages are sent or sent again, and where values are received.
#include "byteps/net/rdma/outbox.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/net/rdma/inbox.h"
#include "byteps/net/rdma/queues.h"

namespace ps {
namespace rdma {
namespace {

using Keys = std::vector<uint64_t>;

class OutboxTest : public testing::Test {
 protected:
  void Push(uint64_t key) {
    auto message = std::make_unique<Outgoing>();
    message->key = key;
    message->value_bytes = 100;
    outbox_.Push(std::move(message));
  }

  // Sends the next message in a frame.
  void SendInFrame() { outbox_.Sent(outbox_.TakeNext()); }
  // Asks for the next message's destination; returns its id.
  uint32_t Ask() {
    const uint32_t id = outbox_.NewId();
    outbox_.Asked(id, outbox_.TakeNext());
    return id;
  }
  void WriteAll() { outbox_.Sent(outbox_.TakeWritten()); }

  // Returns the waiting messages, in order.
  Keys Waiting() {
    std::vector<OutgoingPtr> taken;
    while (outbox_.has_next()) taken.push_back(outbox_.TakeNext());
    Keys keys;
    for (auto it = taken.begin(); it != taken.end(); ++it) keys.push_back((*it)->key);
    for (auto it = taken.rbegin(); it != taken.rend(); ++it) outbox_.PutBack(std::move(*it));
    return keys;
  }
  Keys Done() const {
    Keys keys;
    for (const auto& message : done_) keys.push_back(message->key);
    return keys;
  }

  Outbox outbox_;
  OutgoingList done_;
};

TEST_F(OutboxTest, AMessageOfEitherKindArrives) {
  Push(1);
  Push(2);
  const uint32_t id = Ask();
  SendInFrame();
  EXPECT_FALSE(outbox_.Answered(id + 1, {}));
  EXPECT_EQ(outbox_.writing(), nullptr);
  Target target;
  target.address = 77;
  ASSERT_TRUE(outbox_.Answered(id, target));
  EXPECT_FALSE(outbox_.Answered(id, target)) << "once";
  EXPECT_EQ(outbox_.writing()->remote_address, 77u);
  EXPECT_FALSE(outbox_.empty());
  EXPECT_EQ(outbox_.bytes(), 100u);
  WriteAll();
  EXPECT_TRUE(outbox_.empty());
  EXPECT_EQ(outbox_.bytes(), 0u);
  outbox_.Arrived(1, &done_);
  outbox_.Arrived(1, &done_);
  EXPECT_EQ(Done(), Keys({2, 1})) << "in the order of the requests that end them";
  EXPECT_THROW(outbox_.Arrived(1, &done_), Error);
}

// These cases were found by breaking connections repeatedly. They show which messages go first, and
// from where.
TEST_F(OutboxTest, WhatHadBegunGoesBeforeWhatHadNot) {
  for (const uint64_t key : {1, 2, 3, 4}) Push(key);
  const uint32_t first = Ask();
  Ask();
  ASSERT_TRUE(outbox_.Answered(first, {}));
  outbox_.writing()->written = 50;
  outbox_.Interrupt();
  EXPECT_EQ(Waiting(), Keys({1, 2, 3, 4}));
  EXPECT_EQ(outbox_.TakeNext()->written, 0u) << "from its beginning";
  EXPECT_EQ(outbox_.TakeBegunAgain(), 2u);
}

TEST_F(OutboxTest, WhatWasSentGoesBeforeWhatHadBegun) {
  for (const uint64_t key : {1, 2, 3}) Push(key);
  SendInFrame();
  SendInFrame();
  Ask();
  outbox_.Arrived(1, &done_);
  outbox_.Interrupt();
  EXPECT_EQ(Waiting(), Keys({3}));
  outbox_.Resume(1, &done_);
  EXPECT_EQ(Waiting(), Keys({2, 3}));
  EXPECT_EQ(outbox_.bytes(), 200u);
  EXPECT_EQ(outbox_.TakeBegunAgain(), 2u);
  EXPECT_EQ(outbox_.TakeBegunAgain(), 0u);
}

// The device returned a request as failed, although its message had arrived.
TEST_F(OutboxTest, WhatHadComeAfterAllIsNotSentAgain) {
  for (const uint64_t key : {1, 2, 3}) Push(key);
  for (int n = 0; n < 3; ++n) SendInFrame();
  outbox_.Interrupt();
  outbox_.Resume(2, &done_);
  EXPECT_EQ(Done(), Keys({1, 2}));
  EXPECT_EQ(Waiting(), Keys({3}));
  SendInFrame();
  EXPECT_THROW(outbox_.Resume(4, &done_), Error);
  outbox_.Arrived(1, &done_);
  EXPECT_EQ(Done(), Keys({1, 2, 3}));
}

TEST_F(OutboxTest, AnOfferIsForOneAnswerOfItsConnection) {
  const Exchange exchange(3, 0x10, 7);
  Offer offer;
  offer.bytes = 100;
  offer.target.address = 55;
  offer.target.cookie = 9;
  outbox_.Keep(exchange, offer);
  EXPECT_FALSE(outbox_.HasOffer({3, 0x10, 8}));
  Offer taken;
  ASSERT_TRUE(outbox_.TakeOffer(exchange, &taken));
  EXPECT_FALSE(outbox_.TakeOffer(exchange, &taken));
  Push(1);
  outbox_.WriteTo(taken.target, outbox_.TakeNext());
  EXPECT_EQ(outbox_.writing()->remote_address, 55u);
  EXPECT_EQ(outbox_.writing()->cookie, 9u);
  outbox_.Keep(exchange, offer);
  outbox_.Interrupt();
  EXPECT_FALSE(outbox_.HasOffer(exchange));
  EXPECT_EQ(Waiting(), Keys({1})) << "asks where to, over the next one";
}

TEST_F(OutboxTest, WhatIsGivenUpBeforeItIsOfferedIsNotOffered) {
  std::string memory(20, '-');
  Push(1);
  Push(2);
  auto first = outbox_.TakeNext(), second = outbox_.TakeNext();
  first->place = {&memory[0], 10, nullptr};
  second->place = {&memory[10], 10, nullptr};
  outbox_.PutBack(std::move(second));
  outbox_.PutBack(std::move(first));
  outbox_.Withdraw(&memory[9], 1);
  EXPECT_EQ(outbox_.TakeNext()->place.begin, nullptr);
  EXPECT_EQ(outbox_.TakeNext()->place.begin, &memory[10]);
}

TEST_F(OutboxTest, WhatTheDeviceMayReadStaysLonger) {
  for (const uint64_t key : {1, 2, 3}) Push(key);
  SendInFrame();
  Ask();
  outbox_.TakeUnsent(&done_);
  EXPECT_EQ(Done(), Keys({3, 2}));
  outbox_.TakeSent(&done_);
  EXPECT_EQ(Done(), Keys({3, 2, 1}));
  EXPECT_TRUE(outbox_.empty());
}

// ----- receiving

constexpr uint64_t kBytes = 1000;
constexpr uint64_t kWindow = 2 * kBytes;

// Returns an object in place of a registration.
std::shared_ptr<Region> AnyRegion() {
  static char any;
  return std::shared_ptr<Region>(std::shared_ptr<void>(), reinterpret_cast<Region*>(&any));
}

class InboxTest : public testing::Test {
 protected:
  // Receives a request to send a value, which is to be received at `place`; null: into any memory.
  void Come(uint32_t id, char* place = nullptr) {
    Incoming incoming;
    incoming.id = id;
    incoming.value_bytes = kBytes;
    incoming.sizes = {kBytes};
    incoming.place = place;
    inbox_.Wait(std::move(incoming));
  }
  // Finds memory for the first message.
  void Clear() {
    ASSERT_TRUE(inbox_.MayClear(kWindow));
    inbox_.BeginClearing();
    EXPECT_FALSE(inbox_.MayClear(kWindow)) << "one thread at a time";
    Memory memory;
    if (char* place = inbox_.first()->place) {
      memory.bytes.reset(place, kBytes, [](char*) {});
      memory.region = AnyRegion();
    } else {
      memory.bytes = SArray<char>(kBytes);
    }
    inbox_.EndClearing(std::move(memory));
  }
  // Tells the sender of the next message where to write; returns the message's cookie.
  uint32_t Tell(uint32_t id) {
    uint32_t told = 0;
    const Target target = inbox_.Tell(&told);
    EXPECT_EQ(told, id);
    EXPECT_NE(target.address, 0u);
    return target.cookie;
  }

  // Offers a destination for the answer to this request; returns the cookie.
  uint32_t MakeOffer(uint64_t number, char* place) {
    const Offer offer = inbox_.MakeOffer({3, 0x10, number}, {place, kBytes, AnyRegion()}, 77);
    EXPECT_EQ(offer.target.address, reinterpret_cast<uintptr_t>(place));
    EXPECT_EQ(offer.target.rkey, 77u);
    EXPECT_EQ(offer.bytes, kBytes);
    return offer.target.cookie;
  }
  // Begins an answer of this size into the offered destination.
  bool Begin(uint64_t number, uint32_t cookie, uint64_t bytes = kBytes) {
    Incoming incoming;
    incoming.value_bytes = bytes;
    incoming.sizes = {bytes};
    return inbox_.BeginOffered({3, 0x10, number}, cookie, std::move(incoming));
  }

  Inbox inbox_;
  Incoming incoming_;
  std::string place_ = std::string(2 * kBytes, '-');
};

TEST_F(InboxTest, AsManyAtATimeAsTheWindowHolds) {
  for (const uint32_t id : {1, 2, 3}) Come(id);
  Clear();
  Clear();
  EXPECT_FALSE(inbox_.MayClear(kWindow));
  const uint32_t cookie = Tell(1);
  EXPECT_FALSE(inbox_.Take(cookie + 1, &incoming_)) << "its sender was not told";
  ASSERT_TRUE(inbox_.Take(cookie, &incoming_));
  EXPECT_EQ(incoming_.id, 1u);
  EXPECT_FALSE(inbox_.Take(cookie, &incoming_)) << "once";
  Clear();
  EXPECT_FALSE(inbox_.any_waits());
}

TEST_F(InboxTest, OneAloneMayBeLargerThanTheWindow) {
  Come(1);
  EXPECT_TRUE(inbox_.MayClear(1));
}

TEST_F(InboxTest, WhatIsGivenUpBeforeItsSenderIsToldGoesElsewhere) {
  Come(1, &place_[0]);
  Clear();
  EXPECT_TRUE(inbox_.IsWrittenTo(place_.data() + 10, 1));
  EXPECT_FALSE(inbox_.Abandon(place_.data() + kBytes, 1)) << "something else";
  EXPECT_TRUE(inbox_.Abandon(place_.data() + 10, 1));
  EXPECT_FALSE(inbox_.IsWrittenTo(place_.data(), kBytes));
  EXPECT_FALSE(inbox_.any_to_tell());
  Clear();
  ASSERT_TRUE(inbox_.Take(Tell(1), &incoming_));
  EXPECT_TRUE(incoming_.drop);
  EXPECT_EQ(incoming_.place, nullptr);
}

TEST_F(InboxTest, WhatIsGivenUpWhileItComesIsDropped) {
  Come(1, &place_[0]);
  Clear();
  const uint32_t cookie = Tell(1);
  EXPECT_FALSE(inbox_.Abandon(place_.data(), kBytes));
  EXPECT_TRUE(inbox_.IsWrittenTo(place_.data(), kBytes)) << "until all of it is there";
  ASSERT_TRUE(inbox_.Take(cookie, &incoming_));
  EXPECT_TRUE(incoming_.drop);
  EXPECT_FALSE(inbox_.IsWrittenTo(place_.data(), kBytes));
}

TEST_F(InboxTest, WhatIsGivenUpWhileItWaitsGetsOtherMemory) {
  Come(1, &place_[0]);
  EXPECT_FALSE(inbox_.Abandon(place_.data(), kBytes));
  Clear();
  EXPECT_FALSE(inbox_.IsWrittenTo(place_.data(), kBytes));
  ASSERT_TRUE(inbox_.Take(Tell(1), &incoming_));
  EXPECT_TRUE(incoming_.drop);
}

TEST_F(InboxTest, AnAnswerComesToTheOfferedPlace) {
  const uint32_t cookie = MakeOffer(1, &place_[0]);
  EXPECT_FALSE(inbox_.Take(cookie, &incoming_)) << "nobody has said what it is";
  EXPECT_FALSE(Begin(1, cookie + 1));
  EXPECT_FALSE(Begin(2, cookie));
  EXPECT_FALSE(Begin(1, cookie, kBytes - 1));
  ASSERT_TRUE(Begin(1, cookie));
  EXPECT_FALSE(Begin(1, cookie)) << "once";
  EXPECT_TRUE(inbox_.IsWrittenTo(place_.data(), 1));
  EXPECT_FALSE(inbox_.IsOffered(place_.data(), 1));
  ASSERT_TRUE(inbox_.Take(cookie, &incoming_));
  EXPECT_TRUE(incoming_.was_offered);
  EXPECT_EQ(incoming_.memory.bytes.data(), place_.data());
  EXPECT_FALSE(inbox_.IsWrittenTo(place_.data(), 1));
}

TEST_F(InboxTest, AnOfferEndsWithItsAnswerAndWithTheConnection) {
  MakeOffer(1, &place_[0]);
  const uint32_t second = MakeOffer(2, &place_[kBytes]);
  inbox_.EndOffer({3, 0x10, 1});  // the answer was an error
  inbox_.EndOffer({3, 0x10, 1});
  EXPECT_FALSE(inbox_.IsWrittenTo(place_.data(), kBytes));
  inbox_.Forget();
  EXPECT_FALSE(Begin(2, second));
  EXPECT_FALSE(inbox_.IsWrittenTo(place_.data(), 2 * kBytes));
}

TEST_F(InboxTest, WhatWasOfferedAndIsGivenUpIsDropped) {
  const uint32_t cookie = MakeOffer(1, &place_[0]);
  EXPECT_FALSE(inbox_.Abandon(place_.data(), 1));
  EXPECT_TRUE(inbox_.IsWrittenTo(place_.data(), 1)) << "until the connection is gone";
  ASSERT_TRUE(Begin(1, cookie));
  ASSERT_TRUE(inbox_.Take(cookie, &incoming_));
  EXPECT_TRUE(incoming_.drop);
}

// The message comes again over the next connection, and the old memory is no longer used.
TEST_F(InboxTest, WhatHadBegunToComeIsForgotten) {
  inbox_.Came();
  for (const uint32_t id : {1, 2, 3}) Come(id);
  Clear();
  const uint32_t cookie = Tell(1);
  Clear();
  inbox_.Forget();
  EXPECT_FALSE(inbox_.any_waits());
  EXPECT_FALSE(inbox_.any_to_tell());
  EXPECT_FALSE(inbox_.Take(cookie, &incoming_));
  EXPECT_EQ(inbox_.received(), 1u) << "messages that came whole still count";
  for (const uint32_t id : {1, 2}) Come(id);
  Clear();
  Clear();
}

}  // namespace
}  // namespace rdma
}  // namespace ps
