// Simulated servers without a network, which follow a test's script.
//
// Several threads answer requests, like a transport's threads. The answer to a PUSH_PULL is the
// values times `ranks`, as if this number of ranks had pushed the same values.
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
  float ranks = 3;         // PUSH_PULL: factor of the values
  bool in_place = true;    // whether PlaceFor is asked where to receive values
  bool shuffled = false;   // whether requests are answered in random order
  size_t chunk = 1 << 30;  // bytes of the pieces in which values are received
  int chunk_us = 0;        // time that a piece takes
  int linger_ms = 0;       // delay in Send after a push is sent
  std::string refusal;     // error of every declaration
  std::string failure;     // error of every push
  bool drops_declarations = false;
  bool answers_twice = false;     // answers every push twice
  bool all_confirm = false;       // all members have each sum when the next is answered
  std::function<void()> on_push;  // called by Send for each push; may throw
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

  // ----- changes to the script

  void Change(const std::function<void(Script*)>& change);
  // Stops answers to pushes to this server until Release. With `unsent`, such pushes do not count
  // as sent either. -1: any server.
  void HoldServer(int server, bool unsent);
  void Release();
  void FailJob(const std::string& reason);
  // Reports the loss of a server. `drops`: its unanswered requests are dropped.
  void LoseServer(int server, bool drops = true);
  // Reports the replacement of a server.
  void ReplaceServer(int server);

  // (key of the tensor + partition, server) of each push, in the order of sending.

  std::vector<std::vector<Declaration>> declarations(int server);
  // (key of the tensor + partition, server), in the order of sending.
  std::vector<std::pair<uint64_t, int>> pushes();
  // Sums that were given: (key of the tensor + partition, round).
  std::vector<std::pair<uint64_t, uint32_t>> gifts();
  // Releases in their order: (key of the tensor, server).
  std::vector<std::pair<uint64_t, int>> releases();
  // Waits until there were `count` pushes. Returns false after 20 s.
  bool AwaitPushes(size_t count);
  bool AwaitHeld(size_t count);
  // Waits until values are being received into the user's memory.
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
  // `placed`: the entry that the caller removes from placing_ after the answer was delivered.
  SharedBytes Receive(const MessageHead& head, const std::vector<char>& values, Placing** placed);
  void ReceiveInPieces(const std::vector<char>& values, Placing* placing);

  std::mutex mu_;
  std::condition_variable cond_;
  Script script_;
  ChannelUser* user_ = nullptr;
  bool stopping_ = false;
  std::map<int, bool> held_servers_;  // by rank, with `unsent`
  std::deque<Message> held_;
  uint64_t serial_ = 0;  // serial of the last sum
  std::deque<Message> requests_;
  std::map<int, std::vector<std::vector<Declaration>>> declarations_;
  std::vector<std::pair<uint64_t, int>> pushes_;
  std::vector<std::pair<uint64_t, uint32_t>> gifts_;
  std::vector<std::pair<uint64_t, int>> releases_;
  std::mt19937 random_{1};
  std::atomic<int> left_{0};

  std::mutex place_mu_;  // held while a piece is written, and during PlaceFor
  std::condition_variable place_cond_;
  std::list<Placing> placing_;
  std::vector<std::thread> threads_;
};

// ----- a worker with such servers, and its tensors

constexpr auto kPatience = std::chrono::seconds(60);
constexpr int kPage = 4096;

// A worker in a job of three.
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

  // The error that Wait throws.
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

  // Waits for a metric to reach this value. A push loop may free a message, and with it room in the
  // window, only after the answer has arrived.
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
