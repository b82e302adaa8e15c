// What a server takes from others: late or bad messages of its neighbors, rounds of a server that
// is lost, and what rounding lost there.
#include "byteps/server/backup_link.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/base/block_codec.h"
#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/base/wire.h"
#include "byteps/server/backup_link.h"
#include "byteps/server/copy_record.h"
#include "byteps/server/sum_server.h"
#include "tests/server/optimizer/step_job.h"
#include "tests/support/kit.h"

namespace byteps {
namespace core {
namespace {

constexpr size_t kCount = 4;
constexpr uint8_t kAnswer = 1;
constexpr uint8_t kAnew = 2;
constexpr uint8_t kHasState = 4;

// Rank 1 of two: rank 0 is its primary, and its backup.
class Neighbor : public ServerChannel, public BackupUser {
 public:
  void Send(const Message& message) override { sent.push_back(message); }
  int rank() const override { return 1; }
  void InThreadOf(uint64_t, std::function<void()> task) override {
    defers ? deferred.push_back(std::move(task)) : task();
  }
  void OnCopied(uint64_t, uint64_t number) override { copied.push_back(number); }
  void OnBackup(uint64_t pass) override {
    if (pass != 0 && before_backup) before_backup();
    backups.push_back(pass);
  }
  void OnFetched() override { ++fetched; }

  bool defers = false;
  std::function<void()> before_backup;
  std::vector<std::function<void()>> deferred;
  std::vector<Message> sent;
  std::vector<uint64_t> copied, backups;
  int fetched = 0;
};

class BackupLinkTest : public testing::Test {
 protected:
  BackupLinkTest() {
    auto rule = std::make_shared<UpdateRule>();
    rule->algorithm = UpdateRule::kSgd;
    rule->groups = {{}};
    rule->segments = {{kCount, 0}};
    declaration_.name = "w";
    declaration_.bytes = declaration_.partition_bytes = kCount * sizeof(float);
    declaration_.group = {0};
    declaration_.rule = rule;
  }

  // What is sent by that; the last message.
  Message Tell(int op, std::string body, uint64_t key = 0, uint64_t number = 1,
               const std::vector<float>& values = {}) {
    Message message = MakeRequest(op, 0, key, number, std::move(body));
    message.between_servers = true;
    if (!values.empty()) {
      const SharedBytes bytes = SharedBytes::New(values.size() * sizeof(float));
      memcpy(bytes.data(), values.data(), bytes.size());
      message.SetValues(bytes);
    }
    user_.sent.clear();
    link_.OnMessage(&message);
    return user_.sent.empty() ? Message() : user_.sent.back();
  }
  // The backup answers a request of this server.
  void Answer(int op, uint64_t key, uint64_t number, const std::string& error) {
    Message answer = MakeAnswer(op, 0, key, number, error);
    answer.between_servers = true;
    link_.OnMessage(&answer);
  }
  // `pass`: of this server, by a backup of this life.  Returns the pass of the other one.
  uint64_t Meet(uint64_t life, uint64_t pass = 0, uint8_t flags = kAnswer) {
    WireWriter out;
    out.Put(life);
    out.Put(pass);
    out.Put(pass == 0 ? 0 : own_life_);
    out.Put(flags);
    Tell(kMeet, out.Take());
    for (const Message& message : user_.sent) {
      if (message.op != kMeet) continue;
      WireReader in(message.body);
      own_life_ = in.Get<uint64_t>();
      return in.Get<uint64_t>();
    }
    return 0;
  }
  Message Copy(const CopyRecord& record, const std::vector<float>& values = {}) {
    return Tell(kCopy, record.Pack(), declaration_.Key(), record.pass << 32 | 1, values);
  }
  CopyRecord State(uint64_t pass) const {
    CopyRecord record;
    record.pass = pass;
    record.what = CopyRecord::kState;
    record.declaration = PackDeclarations({declaration_});
    record.slots = 1;
    return record;
  }
  // The first parameter of the copy, as a server that comes is told it.
  float Fetched(uint64_t pass) {
    Tell(kFetch, "", 0, pass);
    for (const Message& message : user_.sent) {
      if (message.op != kFetched || message.values.size() < sizeof(float)) continue;
      float first = 0;
      memcpy(&first, message.values.data(), sizeof(first));
      return first;
    }
    return -1;
  }

  Neighbor user_;
  BackupLink link_{true, 2, 1, &user_, &user_};
  Declaration declaration_;
  uint64_t own_life_ = 0;
};

TEST_F(BackupLinkTest, ARecordOfAServerThatWasLostIsNotTaken) {
  const uint64_t first = Meet(70);
  EXPECT_FALSE(Copy(State(first), {1, 1, 1, 1}).failed);
  EXPECT_FALSE(user_.sent.empty());
  const uint64_t second = Meet(71);
  EXPECT_GT(second, first);
  Copy(State(first), {5, 5, 5, 5});
  EXPECT_TRUE(user_.sent.empty()) << "an answer would be taken for one of its successor's";
  EXPECT_EQ(Fetched(second), 1);
  EXPECT_FALSE(Copy(State(second), {2, 2, 2, 2}).failed);
  EXPECT_EQ(Fetched(second), 2);
}

// Else the server would tell a backup that is lost, and wait for its answers for ever.
TEST_F(BackupLinkTest, ALossIsToldAfterTheBackupThatWasLost) {
  std::thread loss;
  std::atomic<bool> is_told{false};
  user_.before_backup = [&] {
    loss = std::thread([&] {
      link_.OnServerLost(0);
      is_told = true;
    });
    // Time enough for a loss that would overtake this.
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
    while (!is_told && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  };
  Meet(70);
  Meet(70, 9, 0);
  Answer(kFetch, 0, 9, "");
  ASSERT_TRUE(loss.joinable());
  loss.join();
  EXPECT_EQ(user_.backups, (std::vector<uint64_t>{9, 0}));
}

TEST_F(BackupLinkTest, OneLifeHasOnePassUnlessItAsksAnew) {
  const uint64_t first = Meet(70);
  EXPECT_EQ(Meet(70), first);
  EXPECT_GT(Meet(70, 0, kAnswer | kAnew), first);
}

TEST_F(BackupLinkTest, WhatAServerHasBeforeItMeetsItsBackupIsNotCopiedYet) {
  const uint64_t pass = Meet(70, 0, kAnswer | kHasState);
  const Message refusal = Tell(kFetch, "", 0, pass);
  EXPECT_TRUE(refusal.failed);
  EXPECT_NE(refusal.body.find("load the last checkpoint"), std::string::npos) << refusal.body;
  CopyRecord record;
  record.pass = pass;
  record.what = CopyRecord::kComplete;
  EXPECT_FALSE(Copy(record).failed);
  EXPECT_FALSE(Tell(kFetch, "", 0, pass).failed);
}

TEST_F(BackupLinkTest, TheNewestPassOfABackupCounts) {
  Meet(70);
  Meet(70, 9, 0);
  Tell(kMeet, "");  // it does not parse
  const auto fetch = [&] { return user_.sent.empty() ? 0 : user_.sent.back().number; };
  Meet(70, 8, 0);
  EXPECT_EQ(fetch(), 0u) << "that has overtaken the other one";
  Meet(71, 3, 0);
  EXPECT_EQ(fetch(), 3u) << "of a backup that comes";
  Meet(70, 10, 0);
  EXPECT_EQ(fetch(), 0u) << "of one that was lost";
}

TEST_F(BackupLinkTest, WhatHasNotItsFormIsRefusedAndTheCopyIsNotWhole) {
  const uint64_t pass = Meet(70);
  EXPECT_FALSE(Copy(State(pass), {1, 1, 1, 1}).failed);
  EXPECT_TRUE(Tell(kCopy, "what?", declaration_.Key()).failed);
  EXPECT_TRUE(Copy(State(pass), {1, 1}).failed) << "half a state";
  CopyRecord round;
  round.pass = pass;
  round.what = CopyRecord::kRound;
  round.op = kPushStep;
  round.step = "no step";
  EXPECT_TRUE(Copy(round, {1, 1, 1, 1}).failed);
  EXPECT_TRUE(Tell(kFetch, "", 0, pass).failed);
}

TEST_F(BackupLinkTest, ACopyThatLacksARecordIsWholeOnlyOnceAllIsToldAnew) {
  const uint64_t pass = Meet(70);
  const auto mark = [&](CopyRecord::What what) {
    CopyRecord record;
    record.pass = pass;
    record.what = what;
    EXPECT_FALSE(Copy(record).failed);
  };
  mark(CopyRecord::kBegin);
  EXPECT_FALSE(Copy(State(pass), {1, 1, 1, 1}).failed);
  EXPECT_TRUE(Copy(State(pass), {1, 1}).failed) << "half a state";
  mark(CopyRecord::kComplete);  // sent before the primary heard of that
  EXPECT_TRUE(Tell(kFetch, "", 0, pass).failed);
  mark(CopyRecord::kBegin);
  EXPECT_FALSE(Copy(State(pass), {2, 2, 2, 2}).failed);
  mark(CopyRecord::kComplete);
  EXPECT_EQ(Fetched(pass), 2);
}

TEST_F(BackupLinkTest, AStateThatIsToldAnewWhileItIsSentIsNot) {
  const uint64_t pass = Meet(70);
  Copy(State(pass), {1, 1, 1, 1});
  user_.defers = true;
  Tell(kFetch, "", 0, pass);
  CopyRecord record;
  record.pass = pass;
  record.what = CopyRecord::kBegin;
  EXPECT_FALSE(Copy(record).failed);
  user_.sent.clear();
  ASSERT_EQ(user_.deferred.size(), 1u);
  user_.deferred[0]();
  ASSERT_EQ(user_.sent.size(), 1u);
  EXPECT_EQ(user_.sent[0].op, kFetch);
  EXPECT_TRUE(user_.sent[0].failed);
}

TEST_F(BackupLinkTest, AStepOfARoundBeforeALoadIsNotMade) {
  const uint64_t pass = Meet(70);
  Copy(State(pass), {1, 1, 1, 1});
  UpdateStep step;
  step.number = 1;
  step.rates = {{0.5, 0}};
  CopyRecord record;
  record.pass = pass;
  record.what = CopyRecord::kRound;
  record.op = kPushTry;
  record.step = step.Pack();
  EXPECT_FALSE(Copy(record, {1, 1, 1, 1}).failed);
  EXPECT_FALSE(Copy(State(pass), {3, 3, 3, 3}).failed);
  record.what = CopyRecord::kStep;
  record.settled = step.Pack();
  EXPECT_FALSE(Copy(record).failed);
  EXPECT_EQ(Fetched(pass), 3);
}

TEST_F(BackupLinkTest, ABackupThatLosesItsCopyIsToldNothingMore) {
  Meet(70);
  Meet(70, 9, 0);
  Answer(kFetch, 0, 9, "");
  EXPECT_EQ(user_.backups, std::vector<uint64_t>{9});
  CopyRecord record;
  record.pass = 9;
  const uint64_t number = link_.Tell(declaration_.Key(), record, {});
  Answer(kCopy, declaration_.Key(), number, "it has no memory");
  EXPECT_EQ(user_.backups, (std::vector<uint64_t>{9, 0}));
  EXPECT_EQ(user_.copied, std::vector<uint64_t>{number});
}

// ----- rounds that began at a server that is lost, at the one that has its place
// (server/rounds_failures.cc)

constexpr uint32_t kBytes = 16;

class GivenTest : public testing::Test {
 protected:
  GivenTest() : server_(ConfigWith({{"BYTEPS_SERVER_ENGINE_THREAD", "1"}}), &answers_) {
    declaration_.name = "tensor";
    declaration_.bytes = declaration_.partition_bytes = kBytes;
    declaration_.group = {0, 1, 2};
  }

  // Each rank declares the tensor, and says in which round it goes on.
  void Resume(const std::vector<uint32_t>& rounds) {
    for (int rank = 0; rank < 3; ++rank) {
      Tell(
          MakeRequest(kDeclare, 0, declaration_.Key(), ++number_, PackDeclarations({declaration_})),
          rank);
      EXPECT_FALSE(answers_.Await(number_).failed);
      WireWriter out;
      out.PutSize(1);
      out.Put(declaration_.Key());
      out.Put(rounds[rank]);
      Tell(MakeRequest(kResume, 0, 0, ++number_, out.Take()), rank);
      EXPECT_FALSE(answers_.Await(number_).failed);
    }
  }

  uint64_t Send(int op, int rank, uint32_t round, const std::vector<float>& values,
                const std::vector<bool>& lacks = {}) {
    PushHeader header;
    header.round = header.oldest = round;
    header.timeout_ms = 600'000;
    header.pull_bytes = op == kPushPull ? kBytes : 0;
    header.flags = PushHeader::kKeepsSums;
    Message message =
        MakeRequest(op, 0, declaration_.Key(), ++number_, header.Pack() + PackMembers(lacks));
    const SharedBytes bytes = SharedBytes::New(values.size() * sizeof(float));
    memcpy(bytes.data(), values.data(), bytes.size());
    message.SetValues(bytes);
    Tell(std::move(message), rank);
    return number_;
  }
  // Each rank's values are a power of two.
  uint64_t Push(int rank, uint32_t round) {
    return Send(kPushPull, rank, round, std::vector<float>(4, static_cast<float>(1 << rank)));
  }
  uint64_t Give(int rank, uint32_t round, float sum, const std::vector<bool>& lacks = {}) {
    return Send(kGiveSum, rank, round, std::vector<float>(4, sum), lacks);
  }

  void Tell(Message request, int rank) {
    request.peer = rank;
    server_.OnMessage(&request);
  }

  void Expect(uint64_t number, float value, uint32_t ended,
              const std::vector<size_t>& missing = {}) {
    const Answers::Answer answer = answers_.Await(number);
    ASSERT_FALSE(answer.failed) << answer.body;
    ASSERT_EQ(answer.values.size(), 4u);
    EXPECT_EQ(answer.values[0], value);
    std::string rest = answer.body;
    KeptAnswer kept;
    ASSERT_TRUE(KeptAnswer::Take(&rest, &kept));
    EXPECT_EQ(kept.ended, ended);
    EXPECT_EQ(UnpackMembers(rest, 3), missing);
  }

  Answers answers_;
  SumServer server_;
  Declaration declaration_;
  uint64_t number_ = 0;
};

TEST_F(GivenTest, WhatNobodyHasIsSummedAgain) {
  Resume({7, 7, 7});
  const uint64_t pushes[] = {Push(1, 7), Push(0, 7), Push(2, 7)};
  for (const uint64_t number : pushes) Expect(number, 7, 7);
}

TEST_F(GivenTest, WhatOneHasTheOthersGet) {
  Resume({7, 7, 7});
  const uint64_t before = Push(1, 7);
  EXPECT_FALSE(answers_.Await(Give(0, 7, 700)).failed);
  Expect(before, 700, 0);
  Expect(Push(2, 7), 700, 0);
  // And they go on together.
  const uint64_t next[] = {Push(0, 8), Push(1, 8), Push(2, 8)};
  for (const uint64_t number : next) Expect(number, 7, 8);
}

TEST_F(GivenTest, ItKeepsTheListOfTheSum) {
  Resume({3, 3, 3});
  server_.SetAbsent({1});  // it had pushed, and died
  EXPECT_FALSE(answers_.Await(Give(0, 3, 50)).failed);
  Expect(Push(2, 3), 50, 0);
  server_.SetAbsent({});  // it had died, and is there again
  EXPECT_FALSE(answers_.Await(Give(0, 4, 60, {false, true, false})).failed);
  Expect(Push(2, 4), 60, 0, {1});
  const uint64_t next[] = {Push(0, 5), Push(2, 5), Push(1, 5)};
  for (const uint64_t number : next) Expect(number, 7, 5);
}

TEST_F(GivenTest, SeveralMayGiveTheSame) {
  Resume({5, 5, 6});
  for (const int rank : {0, 1}) EXPECT_FALSE(answers_.Await(Give(rank, 5, 70)).failed);
  const uint64_t next[] = {Push(2, 6), Push(1, 6), Push(0, 6)};
  for (const uint64_t number : next) Expect(number, 7, 6);
}

TEST_F(GivenTest, AWorkerThatIsBehindMayComeLast) {
  Resume({9, 9, 8});
  EXPECT_FALSE(answers_.Await(Give(0, 9, 90)).failed);
  EXPECT_FALSE(answers_.Await(Give(2, 8, 80)).failed) << "all have ended it";
  Expect(Push(1, 9), 90, 0);
  Expect(Push(2, 9), 90, 0);
}

TEST_F(GivenTest, WhatMembersHadPartsOfIsLost) {
  Resume({2, 2, 2});
  EXPECT_FALSE(answers_.Await(Send(kGiveSum, 0, 2, {})).failed);
  const uint64_t first = Push(1, 2), second = Push(2, 2);
  for (const uint64_t number : {first, second}) {
    const Answers::Answer answer = answers_.Await(number);
    EXPECT_TRUE(answer.failed);
    EXPECT_NE(answer.body.find("its sum is lost"), std::string::npos) << answer.body;
  }
}

TEST_F(GivenTest, AGiftWithoutMemoryForItFailsByThatName) {
  Resume({2, 2, 2});
  const uint64_t before = Push(1, 2);
  PushHeader header;
  header.round = header.oldest = 2;
  header.flags = PushHeader::kKeepsSums;
  Message gift = MakeRequest(kGiveSum, 0, declaration_.Key(), ++number_, header.Pack());
  gift.sent_bytes = kBytes;  // the link had no memory for them, and dropped them
  Tell(std::move(gift), 0);
  for (const uint64_t number : {number_, before}) {
    const Answers::Answer answer = answers_.Await(number);
    EXPECT_TRUE(answer.failed);
    EXPECT_NE(answer.body.find("out of memory"), std::string::npos) << answer.body;
  }
}

TEST_F(GivenTest, PartsAloneThatAllHadHarmNobody) {
  Resume({2, 2, 2});
  for (const int rank : {0, 1, 2}) {
    EXPECT_FALSE(answers_.Await(Send(kGiveSum, rank, 2, {})).failed);
  }
  const uint64_t next[] = {Push(2, 3), Push(1, 3), Push(0, 3)};
  for (const uint64_t number : next) Expect(number, 7, 3);
}

TEST_F(GivenTest, WhatHasNotItsFormIsRefused) {
  Resume({0, 0, 0});
  EXPECT_TRUE(answers_.Await(Send(kGiveSum, 0, 0, {1, 2})).failed) << "half a sum";
  EXPECT_TRUE(answers_.Await(Give(0, 0, 1, std::vector<bool>(64, true))).failed);
  Tell(MakeRequest(kResume, 0, 0, ++number_, "what?"), 0);
  EXPECT_TRUE(answers_.Await(number_).failed);
}

// ----- what rounding lost on a server is read, and loaded into another one

using step_tests::Values;

constexpr size_t kBlocks = 2;
constexpr size_t kValuesOfSum = kBlocks * kBlockValues;

// A server of one tensor of int4 blocks, of one partition, that two workers sum.
class SumJob {
 public:
  explicit SumJob(bool feedback = true)
      : server_(ConfigWith({{"BYTEPS_SERVER_ENGINE_THREAD", "1"}}), &answers_) {
    declaration_.name = "tensor";
    declaration_.dtype = DType::kInt4x128;
    declaration_.feedback = feedback;
    declaration_.bytes = declaration_.partition_bytes = kBlocks * SizeOf(declaration_.dtype);
    declaration_.group = {0, 1};
    for (const int rank : {0, 1}) {
      Message told =
          MakeRequest(kDeclare, 0, declaration_.Key(), ++number_, PackDeclarations({declaration_}));
      EXPECT_FALSE(Await(std::move(told), rank).failed);
    }
  }

  // The bits of the sum.
  std::string Sum(uint32_t round) {
    for (const int rank : {0, 1}) {
      std::vector<float> values(kValuesOfSum);
      for (size_t i = 0; i < kValuesOfSum; ++i) {
        values[i] = static_cast<float>((i * 13 + rank * 5 + round * 3) % 29) - 14;
      }
      const SharedBytes blocks = SharedBytes::New(declaration_.bytes);
      EncodeBlocks(declaration_.dtype, blocks.data(), DType::kFloat32, values.data(), kValuesOfSum,
                   nullptr);
      Message push = Request(kPushPull, round, 0, static_cast<uint32_t>(declaration_.bytes));
      push.SetValues(blocks);
      Tell(std::move(push), rank);
    }
    const Values values = answers_.Await(number_).values;
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
  }

  Answers::Answer Read(uint32_t first, uint32_t count) {
    return Await(Request(kReadState, 0, first * sizeof(float), count * sizeof(float)), 1);
  }

  Answers::Answer Load(const Values& values) {
    const SharedBytes bytes = SharedBytes::New(values.size() * sizeof(float));
    memcpy(bytes.data(), values.data(), bytes.size());
    Message load = Request(kLoadState, 0, 0, 0);
    load.SetValues(bytes);
    return Await(std::move(load), 0);
  }

 private:
  Message Request(int op, uint32_t round, uint32_t offset, uint32_t bytes) {
    PushHeader header;
    header.round = round;
    header.timeout_ms = 60'000;
    header.pull_offset = offset;
    header.pull_bytes = bytes;
    return MakeRequest(op, 0, declaration_.Key(), ++number_, header.Pack());
  }

  void Tell(Message message, int rank) {
    message.peer = rank;
    server_.OnMessage(&message);
  }

  Answers::Answer Await(Message message, int rank) {
    const uint64_t number = message.number;
    Tell(std::move(message), rank);
    return answers_.Await(number);
  }

  Answers answers_;
  SumServer server_;
  Declaration declaration_;
  uint64_t number_ = 0;
};

TEST(FeedbackTest, AServerGoesOnWhereAnotherOneStopped) {
  SumJob first, second, third;
  EXPECT_EQ(first.Read(0, kValuesOfSum).values, Values(kValuesOfSum));
  for (uint32_t round = 0; round < 3; ++round) first.Sum(round);
  const Values lost = first.Read(0, kValuesOfSum).values;
  EXPECT_NE(lost, Values(kValuesOfSum));
  EXPECT_EQ(first.Read(40, 7).values, Values(lost.begin() + 40, lost.begin() + 47));
  ASSERT_FALSE(second.Load(lost).failed);
  const std::string fourth = first.Sum(3);
  EXPECT_EQ(second.Read(0, kValuesOfSum).values, lost);
  // Another history.
  for (uint32_t round = 0; round < 3; ++round) {
    second.Sum(round);
    third.Sum(round);
  }
  ASSERT_FALSE(second.Load(lost).failed);
  EXPECT_EQ(second.Sum(3), fourth);
  ASSERT_FALSE(third.Load(Values(kValuesOfSum)).failed);
  EXPECT_NE(third.Sum(3), fourth);
}

TEST(FeedbackTest, OtherFormsAreRefused) {
  SumJob job;
  EXPECT_TRUE(job.Load(Values(kValuesOfSum - 1)).failed);
  EXPECT_TRUE(job.Read(kValuesOfSum, 1).failed);
  EXPECT_FALSE(job.Read(kValuesOfSum - 1, 1).failed);
  SumJob plain(false);
  EXPECT_TRUE(plain.Load(Values(kValuesOfSum)).failed);
  EXPECT_TRUE(plain.Read(0, 1).failed);
}

}  // namespace
}  // namespace core
}  // namespace byteps
