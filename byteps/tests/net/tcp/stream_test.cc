// Tests of reading frames into their destination, and of the order of writing.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/net/link/registration_cache.h"
#include "byteps/net/tcp/frame_reader.h"
#include "byteps/net/tcp/frames.h"
#include "byteps/net/tcp/memory_pool.h"
#include "byteps/net/tcp/read_buffer.h"
#include "byteps/net/tcp/send_queue.h"

namespace ps {
namespace tcp {
namespace {

using Step = FrameReader::Step;

// Returns a message's bytes on the wire.
std::string BytesOfMessage(const std::vector<std::string>& values) {
  Message msg;
  msg.meta.key = 5;
  for (const std::string& value : values) {
    msg.data.emplace_back(value.size());
    std::copy(value.begin(), value.end(), msg.data.back().data());
  }
  const OutgoingPtr outgoing = MakeMessage(msg);
  std::string bytes = outgoing->head;
  for (const std::string& value : values) bytes += value;
  return bytes;
}

std::string TextOf(const SArray<char>& value) { return std::string(value.data(), value.size()); }

class FrameReaderTest : public testing::Test, public FramePlaces {
 protected:
  FrameReaderTest() : reader_(this, std::make_shared<MemoryPool>(1 << 20)) {
    int both[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, both), 0);
    peer_ = Fd(both[0]);
    socket_ = std::make_unique<Stream>(Fd(both[1]), nullptr, Stream::kListens);
  }

  char* PlaceFor(const Meta& /*meta*/, size_t bytes) override {
    asked_.push_back(bytes);
    return place_;
  }

  void Say(const std::string& bytes) {
    ASSERT_EQ(write(peer_.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }

  // Reads the bytes that have arrived. Returns true if a message is complete.
  bool Read() {
    while (true) {
      for (Step step; (step = reader_.Next()) != Step::kMore;) {
        if (step == Step::kMessage) return true;
        ++heads_;
      }
      bool all = false;
      const ssize_t n = reader_.Read(socket_.get(), &all);
      if (n < 0) {
        EXPECT_EQ(errno, EAGAIN);
        return false;
      }
    }
  }

  // Takes the complete message.
  Message Take(bool* whole = nullptr) {
    Message msg;
    const bool taken = reader_.Take(&msg, &bytes_);
    if (whole != nullptr) *whole = taken;
    return msg;
  }

  Fd peer_;
  std::unique_ptr<Stream> socket_;
  char* place_ = nullptr;
  std::vector<size_t> asked_;
  FrameReader reader_;
  int heads_ = 0;
  size_t bytes_ = 0;
};

TEST_F(FrameReaderTest, AMessageInPiecesOfAnySize) {
  const std::string bytes = BytesOfMessage({"one", "", "three"});
  for (size_t first = 0; first <= bytes.size(); ++first) {
    Say(bytes.substr(0, first));
    if (!Read()) {
      Say(bytes.substr(first));
      ASSERT_TRUE(Read());
    }
    const Message msg = Take();
    EXPECT_EQ(bytes_, bytes.size());
    EXPECT_EQ(msg.meta.key, 5u);
    ASSERT_EQ(msg.data.size(), 3u);
    EXPECT_EQ(TextOf(msg.data[0]), "one");
    EXPECT_EQ(TextOf(msg.data[1]), "");
    EXPECT_EQ(TextOf(msg.data[2]), "three");
  }
}

TEST_F(FrameReaderTest, SeveralMessagesByOneRead) {
  Say(BytesOfMessage({"a"}) + MakeFrame(kReceived)->head + BytesOfMessage({"b"}));
  ASSERT_TRUE(Read());
  EXPECT_EQ(TextOf(Take().data[0]), "a");
  ASSERT_TRUE(Read());
  EXPECT_EQ(TextOf(Take().data[0]), "b");
  EXPECT_EQ(heads_, 3);
  EXPECT_FALSE(Read());
}

TEST_F(FrameReaderTest, AValueIsReadToWhereItBelongs) {
  std::string place(100'000, '-');
  place_ = &place[0];
  const std::string value(place.size(), 'v');
  Say(BytesOfMessage({value}));
  ASSERT_TRUE(Read());
  const Message msg = Take();
  EXPECT_EQ(msg.data[0].data(), place.data());
  EXPECT_EQ(place, value);
  EXPECT_EQ(asked_, std::vector<size_t>({value.size()}));
}

TEST_F(FrameReaderTest, WhatNobodyWantsIsDropped) {
  place_ = Nowhere();
  const std::string value(100'000, 'v');
  Say(BytesOfMessage({value}) + BytesOfMessage({}));
  ASSERT_TRUE(Read());
  const Message msg = Take();
  ASSERT_EQ(msg.data.size(), 1u);
  EXPECT_EQ(msg.data[0].size(), 0u);
  EXPECT_EQ(msg.meta.data_size, static_cast<int>(value.size()));
  EXPECT_TRUE(Read()) << "what follows is found";
}

TEST_F(FrameReaderTest, WhatIsAbandonedIsNotWrittenTo) {
  std::string place(100'000, '-');
  place_ = &place[0];
  const std::string bytes = BytesOfMessage({std::string(place.size(), 'v')});
  const size_t half = bytes.size() - place.size() / 2;
  Say(bytes.substr(0, half));
  EXPECT_FALSE(Read());
  reader_.Abandon(place.data() + place.size(), 1);  // other memory
  reader_.Abandon(place.data() + 10, 1);
  const std::string before = place;
  Say(bytes.substr(half));
  ASSERT_TRUE(Read());
  bool whole = true;
  Take(&whole);
  EXPECT_FALSE(whole);
  EXPECT_EQ(place, before);
  // The next message is unaffected.
  Say(bytes);
  ASSERT_TRUE(Read());
  Take(&whole);
  EXPECT_TRUE(whole);
}

// The message comes again from its beginning, over the next socket.
TEST_F(FrameReaderTest, WhatCameByHalfIsForgotten) {
  std::string place(1000, '-');
  place_ = &place[0];
  const std::string bytes = BytesOfMessage({std::string(place.size(), 'v')});
  for (const size_t half : {size_t{3}, bytes.size() - 1010, bytes.size() - 5}) {
    Say(bytes.substr(0, half));
    EXPECT_FALSE(Read());
    reader_.Restart();
    reader_.buffer()->Clear();
    place.assign(place.size(), '-');
    Say(bytes);
    ASSERT_TRUE(Read());
    EXPECT_EQ(Take().data.size(), 1u);
    EXPECT_EQ(place, std::string(place.size(), 'v'));
    EXPECT_EQ(bytes_, bytes.size());
  }
}

TEST_F(FrameReaderTest, WhatIsNoFrameIsSaid) {
  Say(std::string(kFrameHeaderBytes, '\xff'));
  EXPECT_THROW(Read(), Error);
}

TEST(ReadBuffer, TakesALongMetaAndShrinksAgain) {
  ReadBuffer buffer;
  const size_t much = 3 * ReadBuffer::kBytes;
  EXPECT_EQ(buffer.Peek(much), nullptr);
  EXPECT_GE(buffer.Room().iov_len, much);
  buffer.Add(much);
  EXPECT_NE(buffer.Peek(much), nullptr);
  buffer.Skip(much - 10);
  buffer.Shrink();
  EXPECT_EQ(buffer.size(), 10u);
  EXPECT_EQ(buffer.Room().iov_len, ReadBuffer::kBytes - 10);
}

// ----- the order in which messages are written

// Makes a message of this size, named by its key.
OutgoingPtr MessageOf(uint64_t key, size_t bytes) {
  Message msg;
  msg.meta.key = key;
  msg.data.emplace_back(bytes);
  return MakeMessage(msg);
}

constexpr size_t kLarge = 1 << 20;

class SendQueueTest : public testing::Test {
 protected:
  OutgoingPtr Push(size_t bytes) {
    all_.push_back(MessageOf(all_.size(), bytes));
    queue_.Push(all_.back());
    return all_.back();
  }

  // Takes a batch as if it were written; returns the numbers of its messages.
  std::vector<int> Take(uint64_t received = 0) {
    OutgoingList batch;
    queue_.TakeBatch(received, &batch);
    std::vector<int> numbers;
    for (const auto& outgoing : batch) {
      queue_.Written(outgoing->bytes);
      const auto at = std::find(all_.begin(), all_.end(), outgoing);
      numbers.push_back(static_cast<int>(at - all_.begin()));
    }
    return numbers;
  }

  using Numbers = std::vector<int>;

  SendQueue queue_;
  std::vector<OutgoingPtr> all_;
  OutgoingList arrived_;
};

TEST_F(SendQueueTest, FewBytesOvertakeManyThatHaveNotBegun) {
  Push(kLarge);
  Push(kLarge);
  Push(10);
  Push(10);
  EXPECT_EQ(Take(), Numbers({2, 3})) << "several by one call";
  EXPECT_EQ(Take(), Numbers({0}));
  Push(10);
  EXPECT_EQ(Take(), Numbers({4}));
  EXPECT_EQ(Take(), Numbers({1}));
  EXPECT_EQ(Take(), Numbers());
  EXPECT_EQ(queue_.bytes(), 0u);
}

TEST_F(SendQueueTest, BytesAreInFlightUntilTheyHaveArrived) {
  const size_t large = Push(kLarge)->bytes, small = Push(10)->bytes;
  EXPECT_EQ(queue_.bytes_in_flight(), 0u);
  Take();
  EXPECT_EQ(queue_.bytes_in_flight(), small);
  Take();
  EXPECT_EQ(queue_.bytes_in_flight(), small + large);
  queue_.Arrived(1, &arrived_);
  EXPECT_EQ(queue_.bytes_in_flight(), large);
  queue_.Resume(1, &arrived_);
  EXPECT_EQ(queue_.bytes_in_flight(), 0u) << "it waits to be sent again";
  Take();
  EXPECT_EQ(queue_.bytes_in_flight(), large);
  queue_.TakeAll();
  EXPECT_EQ(queue_.bytes_in_flight(), 0u);
}

TEST_F(SendQueueTest, NothingOvertakesAGoodbyeOfThisEnd) {
  Push(kLarge);
  all_.push_back(MakeFrame(kGoodbye));
  queue_.Push(all_.back());
  EXPECT_EQ(Take(), Numbers({0}));
  EXPECT_EQ(Take(), Numbers({1}));
}

TEST_F(SendQueueTest, EachFrameSaysWhatHasCome) {
  Push(10);
  Push(10);
  Take(77);
  for (const auto& outgoing : all_) {
    FrameHeader header;
    ASSERT_TRUE(DecodeFrameHeader(outgoing->head.data(), &header));
    EXPECT_EQ(header.received, 77u);
  }
}

TEST_F(SendQueueTest, WhatIsSentAgainGoesFirstAndInOrder) {
  Push(kLarge);
  Push(10);
  Take();
  Take();  // first 1, then 0
  Push(20);
  EXPECT_EQ(queue_.Resume(0, &arrived_), 2u);
  EXPECT_EQ(queue_.bytes(), all_[0]->bytes + all_[1]->bytes + all_[2]->bytes);
  Push(30);
  EXPECT_EQ(Take(), Numbers({1}));
  EXPECT_EQ(Take(), Numbers({0}));
  EXPECT_EQ(Take(), Numbers({2, 3}));
}

// The second socket breaks while messages are being sent again.
TEST_F(SendQueueTest, ABreakAmidWhatIsSentAgain) {
  for (int n = 0; n < 3; ++n) Push(kLarge);
  for (int n = 0; n < 3; ++n) Take();
  EXPECT_EQ(queue_.Resume(1, &arrived_), 2u);
  EXPECT_EQ(Take(), Numbers({1}));
  EXPECT_THROW(queue_.Arrived(3, &arrived_), Error) << "2 was not sent over this socket";
  EXPECT_EQ(queue_.Resume(1, &arrived_), 2u);
  EXPECT_EQ(Take(), Numbers({1}));
  EXPECT_EQ(Take(), Numbers({2}));
  queue_.Arrived(3, &arrived_);
  EXPECT_TRUE(queue_.all_arrived());
  EXPECT_EQ(arrived_, OutgoingList({all_[0], all_[1], all_[2]}));
}

// A frame without a message is for its socket only, and is not numbered.
TEST_F(SendQueueTest, OnlyMessagesAreSentAgain) {
  all_.push_back(MakeFrame(kReceived));
  queue_.Push(all_.back());
  Push(10);
  EXPECT_EQ(Take(), Numbers({0, 1}));
  EXPECT_EQ(queue_.Resume(0, &arrived_), 1u);
  EXPECT_EQ(Take(), Numbers({1}));
  queue_.Arrived(1, &arrived_);
  EXPECT_TRUE(queue_.all_arrived());
}

TEST_F(SendQueueTest, AllIsLetGoOfWhereTheConnectionEnds) {
  for (const size_t bytes : {size_t{10}, kLarge, size_t{20}}) Push(bytes);
  Take();
  EXPECT_FALSE(queue_.all_arrived());
  EXPECT_EQ(queue_.TakeAll().size(), 3u);
  EXPECT_TRUE(queue_.empty());
  EXPECT_TRUE(queue_.all_arrived());
  EXPECT_EQ(queue_.bytes(), 0u);
}

TEST(VectorOf, GoesOnWhereWritingStopped) {
  const OutgoingList list = {MessageOf(1, 100), MessageOf(2, 200)};
  const size_t all = BytesOf(list);
  for (size_t done = 0; done <= all; ++done) {
    size_t left = 0;
    for (const iovec& piece : VectorOf(list, done)) {
      EXPECT_GT(piece.iov_len, 0u);
      left += piece.iov_len;
    }
    ASSERT_EQ(left, all - done);
  }
}

}  // namespace
}  // namespace tcp
}  // namespace ps
