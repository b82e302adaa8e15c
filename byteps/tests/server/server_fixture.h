// A server and simulated workers: their declarations and pushes, and the answers.
#ifndef BYTEPS_TESTS_SERVER_SERVER_FIXTURE_H_
#define BYTEPS_TESTS_SERVER_SERVER_FIXTURE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/cluster/channel.h"
#include "byteps/server/sum_server.h"
#include "tests/support/kit.h"

namespace byteps {
namespace core {
constexpr auto kPatience = std::chrono::seconds(120);
constexpr uint32_t kPartitionBytes = 16;
constexpr uint32_t kLong = 600'000;  // ms

// Records answers in order of arrival.
class PlayedAnswers : public ServerChannel {
 public:
  struct Answer {
    uint64_t number;
    std::string error;
    std::vector<float> values;
    std::thread::id sent_by;
  };

  void Send(const Message& message) override {
    Answer answer{message.number, message.body, {}, std::this_thread::get_id()};
    answer.values.resize(message.values.size() / sizeof(float));
    memcpy(answer.values.data(), message.values.data(), message.values.size());
    ps::MutexLock lock(&mu_);
    answers_.push_back(std::move(answer));
    held_ = holds_;
    cond_.NotifyAll();
    cond_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return !holds_; });
  }

  // Makes the thread that sends the next answer wait for Release.
  void Hold() {
    ps::MutexLock lock(&mu_);
    holds_ = true;
  }
  bool AwaitHeld() {
    ps::MutexLock lock(&mu_);
    return cond_.WaitFor(&mu_, kPatience, [this]() PS_REQUIRES(mu_) { return held_; });
  }
  void Release() {
    ps::MutexLock lock(&mu_);
    holds_ = held_ = false;
    cond_.NotifyAll();
  }

  size_t Count() {
    ps::MutexLock lock(&mu_);
    return answers_.size();
  }

  // Waits until there are `count` answers, and returns all answers so far.
  std::vector<Answer> Await(size_t count) {
    ps::MutexLock lock(&mu_);
    const bool came =
        cond_.WaitFor(&mu_, kPatience, [&]() PS_REQUIRES(mu_) { return answers_.size() >= count; });
    EXPECT_TRUE(came) << answers_.size() << " of " << count << " answers";
    return answers_;
  }

 private:
  ps::Mutex mu_;
  ps::CondVar cond_;
  std::vector<Answer> answers_ PS_GUARDED_BY(mu_);
  bool holds_ PS_GUARDED_BY(mu_) = false;
  bool held_ PS_GUARDED_BY(mu_) = false;
};

class ServerTest : public testing::Test {
 protected:
  ServerTest() : server_(ConfigWith({{"BYTEPS_SERVER_ENGINE_THREAD", "1"}}), &answers_) {
    declaration_.name = "tensor";
    declaration_.dtype = DType::kFloat32;
    declaration_.bytes = 8 * kPartitionBytes;
    declaration_.partition_bytes = kPartitionBytes;
    declaration_.group = {0, 1};
    for (int rank : {0, 1}) Declare(rank);
    answers_.Await(2);
  }

  void Declare(int rank) {
    Tell(MakeRequest(kDeclare, 0, declaration_.Key(), ++number_, PackDeclarations({declaration_})),
         rank);
  }

  // Returns the request number.
  uint64_t Push(int rank, uint64_t index, uint32_t round, uint32_t timeout_ms, uint32_t oldest = 0,
                std::optional<float> pushed = {}) {
    Message push = MakePush(rank, index, round, timeout_ms, oldest, pushed);
    const uint64_t number = push.number;
    Tell(std::move(push), rank);
    return number;
  }

  Message MakePush(int rank, uint64_t index, uint32_t round, uint32_t timeout_ms,
                   uint32_t oldest = 0, std::optional<float> pushed = {}) {
    PushHeader header;
    header.round = round;
    header.oldest = oldest;
    header.timeout_ms = timeout_ms;
    header.pull_bytes = declaration_.partition_bytes;
    Message push = MakeRequest(kPushPull, 0, declaration_.Key() + index, ++number_, header.Pack());
    const SharedBytes values = SharedBytes::New(declaration_.partition_bytes);
    const float value = pushed.value_or(static_cast<float>(1 + rank + 10 * index));
    for (size_t at = 0; at < values.size(); at += sizeof(value)) {
      memcpy(values.data() + at, &value, sizeof(value));
    }
    push.SetValues(values);
    return push;
  }

  // Waits for the answer to this request, and returns all answers so far.
  std::vector<PlayedAnswers::Answer> AwaitAnswerTo(uint64_t number) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (true) {
      auto answers = answers_.Await(0);
      const bool has = std::any_of(answers.begin(), answers.end(),
                                   [=](const auto& answer) { return answer.number == number; });
      if (has || std::chrono::steady_clock::now() > deadline) return answers;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  // Returns the number of rounds of a tensor of `bytes` bytes that worker 0 may push by itself.
  uint32_t MostRounds(const std::string& name, uint64_t bytes) {
    declaration_.name = name;
    declaration_.bytes = bytes;
    declaration_.partition_bytes =
        std::max(kPartitionBytes, static_cast<uint32_t>(bytes / (kMaxPartitions / 2)));
    for (int rank : {0, 1}) Declare(rank);
    const uint64_t open = server_.OpenRounds();
    answers_.Await(answered_ += 2);
    for (uint32_t round = 0;; ++round) {
      const uint64_t number = Push(0, 0, round, kLong);
      // Accepted pushes have no answer yet.
      if (ComesToHave(open + round + 1, [&] { return answers_.Count() > answered_; })) continue;
      const auto refused = answers_.Await(++answered_).back();
      EXPECT_EQ(refused.number, number);
      EXPECT_NE(refused.error.find("at most " + std::to_string(round) + " rounds are kept"),
                std::string::npos)
          << refused.error;
      return round;
    }
  }

  // Waits until this number of rounds is open. (A round closes only after its answers are sent.)
  bool ComesToHave(uint64_t rounds, const std::function<bool()>& never = [] { return false; }) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (server_.OpenRounds() != rounds) {
      if (never()) return false;
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  void Tell(Message request, int rank) {
    request.peer = rank;
    server_.OnMessage(&request);
  }

  PlayedAnswers answers_;
  SumServer server_;
  Declaration declaration_;
  uint64_t number_ = 0;
  size_t answered_ = 2;
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_TESTS_SERVER_SERVER_FIXTURE_H_
