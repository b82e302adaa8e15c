// Keeps what a server answers, for a test to look at.
#ifndef BYTEPS_TESTS_SUPPORT_ANSWERS_H_
#define BYTEPS_TESTS_SUPPORT_ANSWERS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/base/update_rule.h"
#include "tests/support/server_channel.h"

namespace byteps {
namespace core {

// By number, which each request of a test has to itself.
class Answers : public ServerChannel {
 public:
  static constexpr auto kPatience = std::chrono::seconds(120);

  struct Answer {
    bool failed = false;
    std::string body;
    std::vector<float> values;

    // Members may follow that the sum lacks.
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

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_TESTS_SUPPORT_ANSWERS_H_
