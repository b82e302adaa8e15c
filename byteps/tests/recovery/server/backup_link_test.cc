// Tests of BackupLink: late or malformed messages of neighbors.
#include "byteps/recovery/server/backup_link.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/base/wire.h"
#include "byteps/recovery/server/copy_record.h"
#include "tests/support/kit.h"

namespace byteps {
namespace core {
namespace {

constexpr size_t kCount = 4;
constexpr uint8_t kAnswer = 1;
constexpr uint8_t kAnew = 2;
constexpr uint8_t kHasState = 4;

// Rank 1 of two servers: rank 0 is its primary and its backup.
class Neighbor : public ServerChannel, public BackupUser {
 public:
  void Send(const Message& message) override { sent.push_back(message); }
  int rank() const override { return 1; }
  void InThreadOf(uint64_t, std::function<void()> task) override {
    defers ? deferred.push_back(std::move(task)) : task();
  }
  void OnCopied(uint64_t, uint64_t number) override { copied.push_back(number); }
  void OnBackup(uint64_t token) override {
    if (token != 0 && before_backup) before_backup();
    backups.push_back(token);
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

  // Delivers a message. Returns the last message that is sent because of it.
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
  // Answers a request of this server, as its backup does.
  void Answer(int op, uint64_t key, uint64_t number, const std::string& error) {
    Message answer = MakeAnswer(op, 0, key, number, error);
    answer.between_servers = true;
    link_.OnMessage(&answer);
  }
  // Meets a neighbor, as its instance `instance` that is a backup and gives `token`. Returns the
  // token that the neighbor was given.
  uint64_t Meet(uint64_t instance, uint64_t token = 0, uint8_t flags = kAnswer) {
    WireWriter out;
    out.Put(instance);
    out.Put(token);
    out.Put(token == 0 ? 0 : own_instance_);
    out.Put(flags);
    Tell(kMeet, out.Take());
    for (const Message& message : user_.sent) {
      if (message.op != kMeet) continue;
      WireReader in(message.body);
      own_instance_ = in.Get<uint64_t>();
      return in.Get<uint64_t>();
    }
    return 0;
  }
  Message Copy(const CopyRecord& record, const std::vector<float>& values = {}) {
    return Tell(kCopy, record.Pack(), declaration_.Key(), record.token << 32 | 1, values);
  }
  CopyRecord State(uint64_t token) const {
    CopyRecord record;
    record.token = token;
    record.what = CopyRecord::kState;
    record.declaration = PackDeclarations({declaration_});
    record.slots = 1;
    return record;
  }
  // The first parameter of the copy, as a successor fetches it.
  float Fetched(uint64_t token) {
    Tell(kFetch, "", 0, token);
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
  uint64_t own_instance_ = 0;
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

// In the other order, the server would send to a lost backup, and wait for answers for ever.
TEST_F(BackupLinkTest, ALossIsToldAfterTheBackupThatWasLost) {
  std::thread loss;
  std::atomic<bool> is_told{false};
  user_.before_backup = [&] {
    loss = std::thread([&] {
      link_.OnServerLost(0);
      is_told = true;
    });
    // Gives a loss enough time to overtake this.
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
  const uint64_t token = Meet(70, 0, kAnswer | kHasState);
  const Message refusal = Tell(kFetch, "", 0, token);
  EXPECT_TRUE(refusal.failed);
  EXPECT_NE(refusal.body.find("load the last checkpoint"), std::string::npos) << refusal.body;
  CopyRecord record;
  record.token = token;
  record.what = CopyRecord::kComplete;
  EXPECT_FALSE(Copy(record).failed);
  EXPECT_FALSE(Tell(kFetch, "", 0, token).failed);
}

TEST_F(BackupLinkTest, TheNewestPassOfABackupCounts) {
  Meet(70);
  Meet(70, 9, 0);
  Tell(kMeet, "");  // malformed
  const auto fetch = [&] { return user_.sent.empty() ? 0 : user_.sent.back().number; };
  Meet(70, 8, 0);
  EXPECT_EQ(fetch(), 0u) << "that has overtaken the other one";
  Meet(71, 3, 0);
  EXPECT_EQ(fetch(), 3u) << "of a backup that comes";
  Meet(70, 10, 0);
  EXPECT_EQ(fetch(), 0u) << "of one that was lost";
}

TEST_F(BackupLinkTest, WhatHasNotItsFormIsRefusedAndTheCopyIsNotWhole) {
  const uint64_t token = Meet(70);
  EXPECT_FALSE(Copy(State(token), {1, 1, 1, 1}).failed);
  EXPECT_TRUE(Tell(kCopy, "what?", declaration_.Key()).failed);
  EXPECT_TRUE(Copy(State(token), {1, 1}).failed) << "half a state";
  CopyRecord round;
  round.token = token;
  round.what = CopyRecord::kRound;
  round.op = kPushStep;
  round.step = "no step";
  EXPECT_TRUE(Copy(round, {1, 1, 1, 1}).failed);
  EXPECT_TRUE(Tell(kFetch, "", 0, token).failed);
}

TEST_F(BackupLinkTest, ACopyThatLacksARecordIsWholeOnlyOnceAllIsToldAnew) {
  const uint64_t token = Meet(70);
  const auto mark = [&](CopyRecord::What what) {
    CopyRecord record;
    record.token = token;
    record.what = what;
    EXPECT_FALSE(Copy(record).failed);
  };
  mark(CopyRecord::kBegin);
  EXPECT_FALSE(Copy(State(token), {1, 1, 1, 1}).failed);
  EXPECT_TRUE(Copy(State(token), {1, 1}).failed) << "half a state";
  mark(CopyRecord::kComplete);  // sent before the primary knew of that
  EXPECT_TRUE(Tell(kFetch, "", 0, token).failed);
  mark(CopyRecord::kBegin);
  EXPECT_FALSE(Copy(State(token), {2, 2, 2, 2}).failed);
  mark(CopyRecord::kComplete);
  EXPECT_EQ(Fetched(token), 2);
}

TEST_F(BackupLinkTest, AStateThatIsToldAnewWhileItIsSentIsNot) {
  const uint64_t token = Meet(70);
  Copy(State(token), {1, 1, 1, 1});
  user_.defers = true;
  Tell(kFetch, "", 0, token);
  CopyRecord record;
  record.token = token;
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
  const uint64_t token = Meet(70);
  Copy(State(token), {1, 1, 1, 1});
  UpdateStep step;
  step.number = 1;
  step.rates = {{0.5, 0}};
  CopyRecord record;
  record.token = token;
  record.what = CopyRecord::kRound;
  record.op = kPushTry;
  record.step = step.Pack();
  EXPECT_FALSE(Copy(record, {1, 1, 1, 1}).failed);
  EXPECT_FALSE(Copy(State(token), {3, 3, 3, 3}).failed);
  record.what = CopyRecord::kStep;
  record.settled = step.Pack();
  EXPECT_FALSE(Copy(record).failed);
  EXPECT_EQ(Fetched(token), 3);
}

TEST_F(BackupLinkTest, ABackupThatLosesItsCopyIsToldNothingMore) {
  Meet(70);
  Meet(70, 9, 0);
  Answer(kFetch, 0, 9, "");
  EXPECT_EQ(user_.backups, std::vector<uint64_t>{9});
  CopyRecord record;
  record.token = 9;
  const uint64_t number = link_.Tell(declaration_.Key(), record, {});
  Answer(kCopy, declaration_.Key(), number, "it has no memory");
  EXPECT_EQ(user_.backups, (std::vector<uint64_t>{9, 0}));
  EXPECT_EQ(user_.copied, std::vector<uint64_t>{number});
}

}  // namespace
}  // namespace core
}  // namespace byteps
