// A worker over servers that a script plays, and the tensors that it sums.
#ifndef BYTEPS_TESTS_SUPPORT_JOB_H_
#define BYTEPS_TESTS_SUPPORT_JOB_H_

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/base/error.h"
#include "byteps/engine/worker.h"
#include "fake_channel.h"
#include "settings.h"

namespace byteps {
namespace core {

constexpr auto kPatience = std::chrono::seconds(60);
constexpr int kPage = 4096;

// One worker of a job of three.
struct Job {
  explicit Job(int servers, Script script = {}, Settings settings = {}) {
    settings.insert({"BYTEPS_PARTITION_BYTES", std::to_string(kPage)});
    settings.insert({"BYTEPS_PINNED_BYTES", std::to_string(16 * kPage)});
    auto made = std::make_unique<FakeChannel>(std::move(script));
    channel = made.get();
    worker.Start(ConfigWith(settings), LaunchOf(0, 3), servers, std::move(made));
  }
  ~Job() {
    if (worker.started()) channel->Release();
    worker.Stop(false);
  }

  int64_t Start(const std::string& name, std::vector<float>* values, int device = kCpu,
                DeviceStream stream = nullptr, int priority = 0) {
    return worker.PushPull(RequestFor(name, values, device, stream, priority));
  }

  static PushPullRequest RequestFor(const std::string& name, std::vector<float>* values,
                                    int device = kCpu, DeviceStream stream = nullptr,
                                    int priority = 0) {
    PushPullRequest request;
    request.tensor.name = name;
    request.tensor.bytes = values->size() * sizeof(float);
    request.tensor.device = device;
    request.tensor.placement = 0;
    request.input = request.output = values->data();
    request.priority = priority;
    request.stream = stream;
    return request;
  }

  void Wait(int64_t handle, DeviceStream stream = nullptr) {
    ASSERT_TRUE(worker.WaitFor(handle, stream, kPatience)) << "no answer";
  }

  // What Wait throws.
  std::string ErrorOf(int64_t handle, DeviceStream stream = nullptr) {
    try {
      return worker.WaitFor(handle, stream, kPatience) ? "it was well" : "no answer";
    } catch (const Error& e) {
      return e.what();
    }
  }

  double Metric(const std::string& name) {
    for (const auto& metric : worker.Metrics()) {
      if (metric.name == "byteps_worker_" + name) return metric.value;
    }
    ADD_FAILURE() << "there is no " << name;
    return 0;
  }

  // Whether the metric comes to have this value.  A partition leaves the transport when the push
  // loop lets go of its message, perhaps after the answer has come.
  bool Settles(const std::string& name, double value) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (Metric(name) != value) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  Worker worker;
  FakeChannel* channel;
};

inline std::vector<float> Values(size_t count, int salt) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>((i * 7 + salt * 13) % 1009);
  return values;
}

inline std::vector<float> Times(std::vector<float> values, float ranks) {
  for (float& value : values) value *= ranks;
  return values;
}

inline bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_TESTS_SUPPORT_JOB_H_
