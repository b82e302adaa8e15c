// Messages to a backup (recovery/server/copied_rounds.cc) if memory is short: they are sent later,
// and every request that waits for the backup gets an answer.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/base/wire.h"
#include "byteps/recovery/server/copy_record.h"
#include "tests/server/optimizer/step_job.h"
#include "tests/support/kit.h"
#include "tests/support/recovering_server.h"

namespace byteps {
namespace core {
namespace {

// Small enough to be served by the receiving thread, larger than a server's other allocations.
constexpr size_t kCount = 1024;
constexpr size_t kBytes = kCount * sizeof(float);
constexpr uint64_t kPass = 9;

// Records messages from server 0 to server 1.
class Wire : public Answers {
 public:
  void Send(const Message& message) override {
    if (!message.between_servers) return Answers::Send(message);
    ps::MutexLock lock(&mu_);
    told_.push_back(message);
    cond_.NotifyAll();
  }
  // Waits for a message with this op, and removes it.
  Message Take(int op) {
    ps::MutexLock lock(&mu_);
    const auto find = [&]() PS_REQUIRES(mu_) {
      return std::find_if(told_.begin(), told_.end(), [op](const auto& m) { return m.op == op; });
    };
    EXPECT_TRUE(
        cond_.WaitFor(&mu_, kPatience, [&]() PS_REQUIRES(mu_) { return find() != told_.end(); }));
    Message message = *find();
    told_.erase(find());
    return message;
  }
  bool HasTold() {
    ps::MutexLock lock(&mu_);
    return !told_.empty();
  }

 private:
  ps::Mutex mu_;
  ps::CondVar cond_;
  std::vector<Message> told_ PS_GUARDED_BY(mu_);
};

// Server 0 of two, with a backup, and a tensor with one member.
class Primary {
 public:
  Primary() {
    auto rule = std::make_shared<UpdateRule>();
    rule->speculative = true;
    rule->groups = {{0.9, 0.99, 1e-8, false}};
    rule->segments = {{kCount, 0}};
    tensor_.name = "w";
    tensor_.bytes = tensor_.partition_bytes = kBytes;
    tensor_.group = {0};
    tensor_.rule = rule;
    server_.SetRank(0);
    const Message met = wire_.Take(kMeet);
    WireWriter out;
    out.Put<uint64_t>(5);  // instance of server 1
    out.Put(kPass);
    out.Put(WireReader(met.body).Get<uint64_t>());
    out.Put<uint8_t>(0);
    Tell(kMeet, 0, 1, out.Take());
    AnswerTold(wire_.Take(kFetch));  // the backup has no state
    AnswerTold(wire_.Take(kCopy));   // the whole state was sent
    Ask(MakeRequest(kDeclare, 0, tensor_.Key(), ++number_, PackDeclarations({tensor_})));
    EXPECT_FALSE(wire_.Await(number_).failed);
  }

  Message MakeLoad(uint32_t slot = 0) {
    return Make(kLoadState, std::string(reinterpret_cast<const char*>(&slot), sizeof(slot)), 0);
  }
  Message MakeTry() {
    UpdateStep step;
    step.number = 1;
    step.rates = {{0.5, 0}};
    return Make(kPushTry, std::string(1, static_cast<char>(Verdict::kNone)) + step.Pack(), kBytes);
  }
  void Ask(Message message) {
    message.peer = 0;
    server_.OnMessage(&message);
  }
  // Answers as the backup.
  void AnswerTold(const Message& told) {
    Message answer = MakeAnswer(told.op, 0, told.key, told.number, "");
    answer.between_servers = true;
    answer.peer = 1;
    server_.OnMessage(&answer);
  }
  Wire& wire() { return wire_; }

 private:
  void Tell(int op, uint64_t key, uint64_t number, std::string body) {
    Message message = MakeRequest(op, 0, key, number, std::move(body));
    message.between_servers = true;
    message.peer = 1;
    server_.OnMessage(&message);
  }
  Message Make(int op, const std::string& detail, uint32_t pull_bytes) {
    PushHeader header;
    header.timeout_ms = 600'000;
    header.pull_bytes = pull_bytes;
    Message message = MakeRequest(op, 0, tensor_.Key(), ++number_, header.Pack() + detail);
    const SharedBytes values = SharedBytes::New(kBytes);
    memset(values.data(), 0, kBytes);
    message.SetValues(values);
    return message;
  }

  Wire wire_;
  Declaration tensor_;
  uint64_t number_ = 0;
  RecoveringServer server_{ConfigWith({{"BYTEPS_SERVER_ENGINE_THREAD", "1"},
                                       {"DMLC_NUM_SERVER", "2"},
                                       {"BYTEPS_BACKUP_STATE", "1"},
                                       {"BYTEPS_REPLACE_SERVERS_S", "60"}}),
                           &wire_};
};

TEST(CopiesTest, AStateThatCouldNotBeToldIsToldWholeLater) {
  bool is_loaded = false;
  for (int times = 0; !is_loaded; ++times) {
    ASSERT_LT(times, 300);
    Primary primary;
    Message first = primary.MakeLoad(), second = primary.MakeLoad();
    const uint64_t loaded = first.number, loaded_again = second.number;
    {
      const MemoryOnlyTimes little(times);
      primary.Ask(std::move(first));
    }
    primary.Ask(std::move(second));
    const Message told = primary.wire().Take(kCopy);
    CopyRecord record;
    ASSERT_TRUE(CopyRecord::Unpack(told.body, &record));
    EXPECT_TRUE(record.is_all) << "memory for " << times << " times";
    primary.AnswerTold(told);
    while (!primary.wire().Has(loaded_again)) {
      if (primary.wire().HasTold()) primary.AnswerTold(primary.wire().Take(kCopy));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    is_loaded = primary.wire().Has(loaded) && !primary.wire().Await(loaded).failed;
  }
}

TEST(CopiesTest, ALoadIsToldWithItsSlot) {
  Primary primary;
  primary.Ask(primary.MakeLoad());
  primary.AnswerTold(primary.wire().Take(kCopy));
  primary.Ask(primary.MakeLoad(2));
  CopyRecord record;
  ASSERT_TRUE(CopyRecord::Unpack(primary.wire().Take(kCopy).body, &record));
  EXPECT_FALSE(record.is_all);
  EXPECT_EQ(record.slots, 1U << 2);
}

TEST(CopiesTest, WhoWaitsForABackupIsAnsweredWithoutMemory) {
  Primary primary;
  Message load = primary.MakeLoad();
  const uint64_t loaded = load.number;
  primary.Ask(std::move(load));
  primary.AnswerTold(primary.wire().Take(kCopy));
  ASSERT_FALSE(primary.wire().Await(loaded).failed);
  Message push = primary.MakeTry(), held = primary.MakeLoad();
  const uint64_t pushed = push.number, asked = held.number;
  primary.Ask(std::move(push));
  const Message told = primary.wire().Take(kCopy);
  primary.Ask(std::move(held));
  {
    const NoMemoryFrom limit(kBytes);  // for the parameters of the speculative step
    primary.AnswerTold(told);
    const Answers::Answer answer = primary.wire().Await(pushed);
    EXPECT_TRUE(answer.failed);
    EXPECT_NE(answer.body.find("could not continue with 'w' after it was copied"),
              std::string::npos)
        << answer.body;
  }
  primary.AnswerTold(primary.wire().Take(kCopy));
  EXPECT_FALSE(primary.wire().Await(asked).failed);
}

}  // namespace
}  // namespace core
}  // namespace byteps
