// Released tensors: when a server frees them, and the outcome of their rounds.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/base/wire.h"
#include "byteps/observe/status_record.h"
#include "tests/support/kit.h"
#include "tests/support/recovering_server.h"

namespace byteps {
namespace core {
namespace {

constexpr auto kPatience = std::chrono::seconds(120);
constexpr uint32_t kBytes = 64;

// Records answers by request number.
class Answers : public ServerChannel {
 public:
  void Send(const Message& message) override {
    ps::MutexLock lock(&mu_);
    by_number_[message.number] = message;
    cond_.NotifyAll();
  }
  bool Has(uint64_t number) {
    ps::MutexLock lock(&mu_);
    return by_number_.count(number) > 0;
  }
  Message Await(uint64_t number) {
    ps::MutexLock lock(&mu_);
    EXPECT_TRUE(cond_.WaitFor(&mu_, kPatience,
                              [&]() PS_REQUIRES(mu_) { return by_number_.count(number) > 0; }))
        << "no answer to request " << number;
    return by_number_[number];
  }

 private:
  ps::Mutex mu_;
  ps::CondVar cond_;
  std::map<uint64_t, Message> by_number_ PS_GUARDED_BY(mu_);
};

class ReleaseTest : public testing::Test {
 protected:
  ReleaseTest()
      : server_(std::make_unique<RecoveringServer>(
            ConfigWith({{"BYTEPS_SERVER_ENGINE_THREAD", "2"}}), &answers_)) {
    tensor_.name = "tensor";
    tensor_.bytes = 4 * kBytes;
    tensor_.partition_bytes = kBytes;
    tensor_.group = {0, 1};
  }

  uint64_t Tell(int rank, Message request) {
    request.peer = rank;
    request.number = ++number_;
    server_->OnMessage(&request);
    return number_;
  }

  Message Declare(int rank) {
    const std::string body = PackDeclarations({tensor_});
    return answers_.Await(Tell(rank, MakeRequest(kDeclare, 0, tensor_.Key(), 0, body)));
  }

  uint64_t Release(int rank, const std::vector<Declaration>& tensors) {
    WireWriter out;
    out.PutSize(tensors.size());
    for (const Declaration& tensor : tensors) out.Put(tensor.Key());
    return Tell(rank, MakeRequest(kRelease, 0, tensors.front().Key(), 0, out.Take()));
  }

  uint64_t Push(int rank, uint32_t round, uint64_t index = 0) {
    PushHeader header;
    header.round = header.oldest = round;
    header.timeout_ms = 600'000;
    header.pull_bytes = tensor_.partition_bytes;
    return Tell(rank, WithValues(MakeRequest(kPushPull, 0, tensor_.Key() + index, 0, header.Pack()),
                                 std::vector<float>(tensor_.partition_bytes / sizeof(float),
                                                    static_cast<float>(1 + rank))));
  }

  static Message WithValues(Message message, const std::vector<float>& values) {
    const SharedBytes bytes = SharedBytes::New(values.size() * sizeof(float));
    memcpy(bytes.data(), values.data(), bytes.size());
    message.SetValues(bytes);
    return message;
  }

  double Metric(const std::string& name) {
    for (const auto& metric : server_->Metrics()) {
      if (metric.name == "byteps_server_" + name) return metric.value;
    }
    ADD_FAILURE() << "there is no " << name;
    return -1;
  }

  // Tensors and partitions that the server has; partitions disappear a moment later.
  std::pair<uint64_t, uint64_t> Kept() {
    StatusRecord record;
    EXPECT_TRUE(StatusRecord::Parse(server_->Report(), &record));
    return {record.tensors, record.keys};
  }
  bool ComesToKeep(uint64_t tensors, uint64_t keys) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (Kept() != std::pair(tensors, keys)) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  std::string SumOf(uint32_t round) {
    for (uint64_t i = 0; i < tensor_.NumPartitions(); ++i) {
      const uint64_t first = Push(0, round, i), second = Push(1, round, i);
      for (const uint64_t number : {first, second}) {
        const Message answer = answers_.Await(number);
        if (answer.failed) return answer.body;
        float sum = 0;
        memcpy(&sum, answer.values.data(), sizeof(sum));
        if (sum != 3) return "the sum is " + std::to_string(sum);
      }
    }
    return "";
  }

  Answers answers_;
  std::unique_ptr<SumServer> server_;
  Declaration tensor_;
  uint64_t number_ = 0;
};

TEST_F(ReleaseTest, ATensorIsFreedOnceNoMemberHoldsIt) {
  for (int rank : {0, 1}) EXPECT_EQ(Declare(rank).body, "");
  EXPECT_EQ(SumOf(0), "");
  EXPECT_TRUE(ComesToKeep(1, 4));
  const uint64_t first = Release(0, {tensor_});
  EXPECT_FALSE(answers_.Has(first));
  EXPECT_EQ(Kept(), std::pair(1ul, 4ul));
  const uint64_t second = Release(1, {tensor_});
  for (const uint64_t number : {first, second}) EXPECT_EQ(answers_.Await(number).body, "");
  EXPECT_TRUE(ComesToKeep(0, 0));
  EXPECT_TRUE(answers_.Await(Push(0, 1)).body.find("all members have released") !=
              std::string::npos);
}

TEST_F(ReleaseTest, WhoGoesOnWithAReleasedTensorHearsWhoReleasedIt) {
  for (int rank : {0, 1}) Declare(rank);
  const uint64_t open = Push(1, 0);
  Release(0, {tensor_});
  const std::string wanted = "worker 0 has released 'tensor'";
  EXPECT_NE(answers_.Await(open).body.find(wanted), std::string::npos);
  EXPECT_NE(answers_.Await(Push(1, 1)).body.find(wanted), std::string::npos);
  EXPECT_EQ(server_->OpenRounds(), 0u);
}

TEST_F(ReleaseTest, WhoLeavesHoldsNothing) {
  for (int rank : {0, 1}) Declare(rank);
  const uint64_t released = Release(0, {tensor_});
  server_->OnWorkerGone(1, "worker 1 is done");
  EXPECT_EQ(answers_.Await(released).body, "");
  EXPECT_TRUE(ComesToKeep(0, 0));
}

TEST_F(ReleaseTest, ThoseThatAreAbsentHoldWhatTheyDeclareFromThenOn) {
  for (int rank : {0, 1}) Declare(rank);
  server_->SetAbsent({1});
  Declare(1);  // its next life prepares to join
  const uint64_t released = Release(0, {tensor_});
  EXPECT_EQ(Kept().first, 1u);
  EXPECT_FALSE(answers_.Has(released));
  server_->SetAbsent({});
  server_->SetAbsent({1});
  EXPECT_EQ(answers_.Await(released).body, "");
  EXPECT_TRUE(ComesToKeep(0, 0));
}

// One message releases two tensors. Another member still uses the second one.
TEST_F(ReleaseTest, AReleaseIsAnsweredWhenAllOfItIsFreed) {
  Declaration other = tensor_;
  other.name = "other";
  for (int rank : {0, 1}) Declare(rank);
  std::swap(tensor_, other);
  for (int rank : {0, 1}) Declare(rank);
  const uint64_t both = Release(0, {tensor_, other});
  Release(1, {other});
  EXPECT_TRUE(ComesToKeep(1, 0));
  EXPECT_FALSE(answers_.Has(both));
  Release(1, {tensor_});
  EXPECT_EQ(answers_.Await(both).body, "");
}

TEST_F(ReleaseTest, TheStateOfAnOptimizerGoesWithItsTensor) {
  auto rule = std::make_shared<UpdateRule>();
  rule->groups = {{0.9, 0.99, 1e-8, false}};
  rule->segments = {{tensor_.bytes / sizeof(float), 0, true}};
  tensor_.rule = rule;
  for (int life = 0; life < 30; ++life) {
    for (int rank : {0, 1}) EXPECT_EQ(Declare(rank).body, "");
    EXPECT_EQ(Metric("state_bytes"), 3.0 * static_cast<double>(tensor_.bytes));
    PushHeader header;
    WireWriter slot;
    slot.Put<uint32_t>(0);
    const std::string detail = header.Pack() + slot.Take();
    const std::vector<float> values(kBytes / sizeof(float), 1);
    for (uint64_t i = 0; i < tensor_.NumPartitions(); ++i) {
      const Message load = MakeRequest(kLoadState, 0, tensor_.Key() + i, 0, detail);
      EXPECT_EQ(answers_.Await(Tell(0, WithValues(load, values))).body, "");
    }
    EXPECT_TRUE(ComesToKeep(1, 4));
    for (int rank : {0, 1}) Release(rank, {tensor_});
    EXPECT_TRUE(ComesToKeep(0, 0));
    EXPECT_EQ(Metric("state_bytes"), 0);
    ++tensor_.releases;
  }
}

// The successor of a lost server does not know yet which workers use a tensor.
TEST_F(ReleaseTest, AServerThatComesKeepsATensorUntilAllHaveResumed) {
  const auto resume = [this](int rank) {
    WireWriter out;
    out.PutSize(0);
    return answers_.Await(Tell(rank, MakeRequest(kResume, 0, 0, 0, out.Take()))).body;
  };
  Declare(0);
  EXPECT_EQ(resume(0), "");
  const uint64_t first = Release(0, {tensor_});
  EXPECT_FALSE(answers_.Has(first));
  EXPECT_EQ(Kept().first, 1u);
  Declare(1);
  EXPECT_EQ(resume(1), "");
  EXPECT_FALSE(answers_.Has(first));
  Release(1, {tensor_});
  EXPECT_EQ(answers_.Await(first).body, "");
  EXPECT_TRUE(ComesToKeep(0, 0));
}

}  // namespace
}  // namespace core
}  // namespace byteps
