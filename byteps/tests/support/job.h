// Servers without a network, which do what a test's script says.
//
// Each of several threads answers requests, as a transport's threads would.  A PUSH_PULL is
// answered with `ranks` times the values, as if so many ranks had pushed the same.
#ifndef BYTEPS_TESTS_SUPPORT_JOB_H_
#define BYTEPS_TESTS_SUPPORT_JOB_H_

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/cluster/channel.h"
#include "byteps/engine/worker.h"
#include "byteps/recovery/worker/server_replacement.h"
#include "tests/support/kit.h"

namespace byteps {
namespace core {

struct Script {
  int threads = 3;
  float ranks = 3;         // PUSH_PULL: what the values are multiplied by
  bool in_place = true;    // whether values are received where PlaceFor says
  bool shuffled = false;   // whether requests are answered in a random order
  size_t chunk = 1 << 30;  // values are received in pieces of so many bytes
  int chunk_us = 0;        // and each takes so long
  int linger_ms = 0;       // Send returns so long after the push has gone
  std::string refusal;     // of every declaration
  std::string failure;     // of every push
  bool drops_declarations = false;
  bool answers_twice = false;     // every push
  bool all_confirm = false;       // other members have each sum when the next is answered
  std::function<void()> on_push;  // called in Send, of a push; may throw
};

class FakeChannel : public Channel {
 public:
  explicit FakeChannel(Script script);
  ~FakeChannel() override;

  void Start(ChannelUser* user) override;
  void Leave(const ps::Farewell& farewell) override;
  void Stop() override;
  void Send(const Message& message) override;
  void Abandon(const void* begin, size_t bytes) override;
  bool RegistersMemory() const override { return false; }
  double link_gbps() const override { return 0; }
  double seconds_to_explain() const override { return 0.1; }
  int rank() const override { return 0; }
  std::string NameOfServer(int rank) override { return "server " + std::to_string(rank); }
  std::string NameOfWorker(int rank) override { return "worker " + std::to_string(rank); }

  // ----- the script goes on

  void Change(const std::function<void(Script*)>& change);
  // Pushes that this server gets are not answered, nor counted as sent when `unsent`, until
  // Release.  -1: any server.
  void HoldServer(int server, bool unsent);
  void Release();
  void FailJob(const std::string& reason);
  // The worker hears of that.  `drops`: what the server was sent, and has not answered, is gone.
  void LoseServer(int server, bool drops = true);
  // Another one is there.
  void ReplaceServer(int server);

  // ----- what was seen

  std::vector<std::vector<Declaration>> declarations(int server);
  // (tensor's key + partition, server), in the order in which they were sent.
  std::vector<std::pair<uint64_t, int>> pushes();
  // (tensor's key + partition, round) of the sums that were given.
  std::vector<std::pair<uint64_t, uint32_t>> gifts();
  // (tensor's key, server), in the order in which they were released.
  std::vector<std::pair<uint64_t, int>> releases();
  // Blocks until so many pushes came; false when they do not come within 20 s.
  bool AwaitPushes(size_t count);
  bool AwaitHeld(size_t count);
  // Blocks until values are being received into a place of the user's.
  bool AwaitPlacing();
  int left() const { return left_; }

 private:
  struct Placing {
    char* begin;
    size_t bytes;
    bool abandoned;
  };

  void Run();
  bool TakeNext(Message* request);
  void Answer(Message request);
  std::string Fate(const Message& request);
  KeptAnswer KeptAnswerTo(const PushHeader& header);
  std::string AnswerToGift(const Message& request);
  // `placed`: what the caller removes from placing_ once the answer has been handed on.
  SharedBytes Receive(const MessageHead& head, const std::vector<char>& values, Placing** placed);
  void ReceiveInPieces(const std::vector<char>& values, Placing* placing);

  std::mutex mu_;
  std::condition_variable cond_;
  Script script_;
  ChannelUser* user_ = nullptr;
  bool stopping_ = false;
  std::map<int, bool> held_servers_;  // and whether what is sent to them stays unsent
  std::deque<Message> held_;
  uint64_t serial_ = 0;  // of the last sum
  std::deque<Message> requests_;
  std::map<int, std::vector<std::vector<Declaration>>> declarations_;
  std::vector<std::pair<uint64_t, int>> pushes_;
  std::vector<std::pair<uint64_t, uint32_t>> gifts_;
  std::vector<std::pair<uint64_t, int>> releases_;
  std::mt19937 random_{1};
  std::atomic<int> left_{0};

  std::mutex place_mu_;  // held while one piece is written, and while a place is asked for
  std::condition_variable place_cond_;
  std::list<Placing> placing_;
  std::vector<std::thread> threads_;
};

// ----- a worker over such servers, and the tensors that it sums

constexpr auto kPatience = std::chrono::seconds(60);
constexpr int kPage = 4096;

// One worker of a job of three.
struct Job {
  explicit Job(int servers, Script script = {}, Settings settings = {}) {
    settings.insert({"BYTEPS_PARTITION_BYTES", std::to_string(kPage)});
    settings.insert({"BYTEPS_PINNED_BYTES", std::to_string(16 * kPage)});
    auto made = std::make_unique<FakeChannel>(std::move(script));
    channel = made.get();
    const Config config = ConfigWith(settings);
    worker.Start(config, LaunchOf(0, 3), servers, std::move(made), MakeLossPolicy(config, servers));
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
