// Helpers of the server's tests: recorded answers, and a job with an optimizer.
#ifndef BYTEPS_TESTS_SERVER_OPTIMIZER_STEP_JOB_H_
#define BYTEPS_TESTS_SERVER_OPTIMIZER_STEP_JOB_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
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
#include "byteps/cluster/channel.h"
#include "tests/support/kit.h"
#include "tests/support/recovering_server.h"

namespace byteps {
namespace core {

// Answers by request number. Tests number requests uniquely.
class Answers : public ServerChannel {
 public:
  static constexpr auto kPatience = std::chrono::seconds(120);

  struct Answer {
    bool failed = false;
    std::string body;
    std::vector<float> values;

    // Reads the sums at the beginning of the body. The list of missing members may follow them.
    GradientSums sums() const {
      GradientSums found;
      EXPECT_GE(body.size(), sizeof(found));
      memcpy(&found, body.data(), std::min(body.size(), sizeof(found)));
      return found;
    }
  };

  void Send(const Message& message) override {
    Answer answer{message.failed, message.body, {}};
    answer.values.resize(message.values.size() / sizeof(float));
    memcpy(answer.values.data(), message.values.data(), message.values.size());
    ps::MutexLock lock(&mu_);
    answers_[message.number] = std::move(answer);
    cond_.NotifyAll();
  }

  Answer Await(uint64_t number) {
    ps::MutexLock lock(&mu_);
    const bool came = cond_.WaitFor(&mu_, kPatience,
                                    [&]() PS_REQUIRES(mu_) { return answers_.count(number) > 0; });
    EXPECT_TRUE(came) << "no answer to request " << number;
    return answers_[number];
  }

  bool Has(uint64_t number) {
    ps::MutexLock lock(&mu_);
    return answers_.count(number) > 0;
  }

 private:
  ps::Mutex mu_;
  ps::CondVar cond_;
  std::map<uint64_t, Answer> answers_ PS_GUARDED_BY(mu_);
};

namespace step_tests {

// ----- an optimizer job

constexpr auto kPatience = Answers::kPatience;
constexpr size_t kElements = 40;
constexpr size_t kBytes = kElements * sizeof(float);
using Values = std::vector<float>;

inline std::string Bytes(uint32_t value) { return std::string(reinterpret_cast<char*>(&value), 4); }

inline std::string Packed(Verdict verdict) { return std::string(1, static_cast<char>(verdict)); }

// Server with one tensor, in one partition, which two or three workers update by AdamW.
class Job {
 public:
  explicit Job(uint32_t workers = 2, const std::string& state_bytes = "0")
      : server_(ConfigWith({{"BYTEPS_SERVER_ENGINE_THREAD", "1"},
                            {"BYTEPS_SERVER_STATE_BYTES", state_bytes}}),
                &answers_) {
    declaration_.name = "tensor";
    declaration_.bytes = declaration_.partition_bytes = kBytes;
    declaration_.group = RankGroup::Below(workers);
    auto rule = std::make_shared<UpdateRule>();
    rule->groups = {{0.9, 0.95, 1e-8, false}};
    rule->segments = {{kElements, 0}};
    rule->speculative = true;
    rule->counts_zeros = true;
    declaration_.rule = rule;
  }

  // Returns why the tensor was refused, or "".
  std::string Declare() {
    std::string error;
    for (const uint32_t rank : declaration_.group) {
      const auto answer =
          answers_.Await(Tell(rank, MakeRequest(kDeclare, 0, declaration_.Key(), ++number_,
                                                PackDeclarations({declaration_}))));
      if (answer.failed) error = answer.body;
    }
    return error;
  }

  void Load(float first) { EXPECT_FALSE(LoadBy(0, first).failed); }
  Answers::Answer LoadBy(int rank, float first) {
    Values values(kElements);
    for (size_t i = 0; i < kElements; ++i) values[i] = first + 0.25f * static_cast<float>(i);
    return answers_.Await(Ask(rank, kLoadState, 0, Bytes(0), &values));
  }

  static UpdateStep StepOf(uint64_t number, double scale = 1) {
    UpdateStep step;
    step.number = number;
    step.grad_scale = scale;
    step.rates = {{0.01, 0.1}};
    return step;
  }

  static float GradientOf(size_t i, uint32_t rank, uint32_t round) {
    return static_cast<float>((i * 7 + rank * 3 + round * 5) % 11) - 4;
  }

  uint64_t Push(int op, int rank, uint32_t round, Verdict verdict, const UpdateStep& step) {
    Values gradients(kElements);
    for (size_t i = 0; i < kElements; ++i) {
      gradients[i] = GradientOf(i, rank, round);
    }
    return Push(op, rank, round, verdict, step, gradients);
  }
  uint64_t Push(int op, int rank, uint32_t round, Verdict verdict, const UpdateStep& step,
                const Values& gradients) {
    return Ask(rank, op, round, Packed(verdict) + (op == kPushNorm ? "" : step.Pack()), &gradients);
  }
  uint64_t Try(int rank, uint32_t round, Verdict verdict, const UpdateStep& step) {
    return Push(kPushTry, rank, round, verdict, step);
  }
  uint64_t Step(int rank, uint32_t round, const UpdateStep& step) {
    return Ask(rank, kStep, round, step.Pack(), nullptr);
  }
  // Reads a range of the slot, in bytes.
  uint64_t Read(int rank, uint32_t round, uint32_t slot, Verdict verdict, uint32_t offset = 0,
                uint32_t bytes = kBytes) {
    return Ask(rank, kReadState, round, Packed(verdict) + Bytes(slot), nullptr, offset, bytes);
  }

  // Makes all ranks try a step. Returns the answer, which is the same for all.
  Answers::Answer TryAll(uint32_t round, Verdict verdict, const UpdateStep& step) {
    std::vector<uint64_t> numbers;
    for (const uint32_t rank : declaration_.group)
      numbers.push_back(Try(rank, round, verdict, step));
    const Answers::Answer first = answers_.Await(numbers[0]);
    for (const uint64_t number : numbers) {
      const Answers::Answer other = answers_.Await(number);
      EXPECT_FALSE(other.failed) << other.body;
      EXPECT_EQ(other.values, first.values);
      EXPECT_EQ(other.body, first.body);
    }
    return first;
  }

  // Returns the parameters and moments, as rank 0 reads them.
  Values State(uint32_t round, Verdict verdict = Verdict::kNone) {
    Values all;
    for (uint32_t slot = 0; slot < 3; ++slot) {
      const auto answer = answers_.Await(Read(0, round, slot, verdict));
      EXPECT_FALSE(answer.failed) << answer.body;
      all.insert(all.end(), answer.values.begin(), answer.values.end());
    }
    return all;
  }

  Answers::Answer Await(uint64_t number) { return answers_.Await(number); }
  SumServer& server() { return server_; }

  // Waits until the server holds memory for at most this many values. (An engine thread frees a
  // request's memory only after it has answered.)
  bool ComesToHold(int values) const {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (*held_ != values) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

 private:
  SharedBytes Counted(const Values& values) const {
    ++*held_;
    char* const memory = new char[kBytes];
    memcpy(memory, values.data(), kBytes);
    return SharedBytes::Borrow(memory, kBytes, [held = held_](char* gone) {
      --*held;
      delete[] gone;
    });
  }

  uint64_t Ask(int rank, int op, uint32_t round, const std::string& detail, const Values* values,
               uint32_t offset = 0, uint32_t bytes = kBytes) {
    PushHeader header;
    header.round = header.oldest = round;
    header.timeout_ms = 600'000;
    if (op != kLoadState && op != kPushNorm) {
      header.pull_offset = offset;
      header.pull_bytes = bytes;
    }
    Message request = MakeRequest(op, 0, declaration_.Key(), ++number_, header.Pack() + detail);
    if (values != nullptr) request.SetValues(Counted(*values));
    return Tell(rank, std::move(request));
  }

  uint64_t Tell(int rank, Message request) {
    request.peer = rank;
    server_.OnMessage(&request);
    return number_;
  }

  const std::shared_ptr<std::atomic<int>> held_ = std::make_shared<std::atomic<int>>(0);
  Answers answers_;
  RecoveringServer server_;
  Declaration declaration_;
  uint64_t number_ = 0;
};

// Returns the state after the same steps, each made at once with its factor; 0: the step is
// skipped.
inline Values MadeAtOnce(const std::vector<double>& scales, uint32_t workers) {
  Job job(workers);
  EXPECT_EQ(job.Declare(), "");
  job.Load(1);
  uint64_t steps = 0;
  for (uint32_t round = 0; round < scales.size(); ++round) {
    UpdateStep step = Job::StepOf(steps + 1, scales[round] == 0 ? 1 : scales[round]);
    step.skip = scales[round] == 0;
    for (uint32_t rank = 0; rank < workers; ++rank) {
      job.Push(kPushStep, rank, round, Verdict::kNone, step);
    }
    steps += !step.skip;
  }
  return job.State(static_cast<uint32_t>(scales.size()) - 1);
}

inline bool Holds(const Values& state, const Values& parameters) {
  return std::equal(parameters.begin(), parameters.end(), state.begin());
}

// Returns the number of zeros in the sum of a round's pushes.
inline double ZerosOf(uint32_t round, uint32_t workers) {
  double zeros = 0;
  for (size_t i = 0; i < kElements; ++i) {
    float sum = 0;
    for (uint32_t rank = 0; rank < workers; ++rank) sum += Job::GradientOf(i, rank, round);
    zeros += sum == 0;
  }
  return zeros;
}

}  // namespace step_tests
}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_TESTS_SERVER_OPTIMIZER_STEP_JOB_H_
