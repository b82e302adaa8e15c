// Helpers shared by tests, without gtest: settings, memory that cannot be allocated, channels of
// servers.
#ifndef BYTEPS_TESTS_SUPPORT_KIT_H_
#define BYTEPS_TESTS_SUPPORT_KIT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/base/mutex.h"
#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/cluster/channel.h"
#include "byteps/server/sum_server.h"

// A condition of a fuzz target: if it does not hold, prints this line and aborts.
#define DEMAND(condition)                                                            \
  do {                                                                               \
    if (!(condition)) {                                                              \
      fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      abort();                                                                       \
    }                                                                                \
  } while (false)

namespace byteps {
namespace core {

using Settings = GivenSettings;

inline Config ConfigWith(const Settings& settings) { return Config::FromEnvironment(settings); }

inline Launch LaunchOf(int rank, int workers) {
  Launch launch;
  launch.rank = rank;
  launch.size = workers;
  return launch;
}

// ----- memory that cannot be allocated: operator new of this program

// Makes allocations of `bytes` bytes or more fail, in all threads, while this object lives.
class NoMemoryFrom {
 public:
  explicit NoMemoryFrom(size_t bytes);
  ~NoMemoryFrom();
};

// Makes all but `times` allocations of this thread fail, while this object lives.
class MemoryOnlyTimes {
 public:
  explicit MemoryOnlyTimes(int times);
  ~MemoryOnlyTimes();
};

class ServerChannel : public Channel {
 public:
  void Start(ChannelUser*) override {}
  void Leave(const ps::Farewell&) override {}
  void Stop() override {}
  void Abandon(const void*, size_t) override {}
  bool RegistersMemory() const override { return false; }
  double link_gbps() const override { return 0; }
  int rank() const override { return 0; }
  std::string NameOfServer(int) override { return "server"; }
  std::string NameOfWorker(int) override { return "worker"; }
};

// ----- a job without a network: real workers and a real server in one process
//
// Each receiver has a thread, which delivers messages to it in the order of sending. A test can
// make a push fail, as if it had failed at its worker only.

// A thread that delivers messages.
class Courier {
 public:
  explicit Courier(std::function<void(Message*)> receive)
      : thread_([this, receive = std::move(receive)] {
          Message message;
          while (queue_.Pop(&message)) {
            receive(&message);
            message = Message();
          }
        }) {}
  ~Courier() {
    queue_.Close();
    thread_.join();
  }
  void Take(Message message) { queue_.Push(std::move(message)); }

 private:
  BlockingQueue<Message> queue_;
  std::thread thread_;
};

class LoopJob {
 public:
  explicit LoopJob(const Config& config) : answers_(this), server_(config, &answers_) {}

  SumServer& server() { return server_; }

  // A worker's channel. This outlives it.
  std::unique_ptr<Channel> ChannelOf(int rank) {
    return std::make_unique<WorkerChannel>(this, rank);
  }

  // Fails the worker's next push with this error; the server never sees it.
  void FailNextPush(int rank, const std::string& error) {
    ps::MutexLock lock(&mu_);
    failing_rank_ = rank;
    failure_ = error;
  }
  // Returns whether the push has failed.
  bool failed() {
    ps::MutexLock lock(&mu_);
    return failing_rank_ < 0;
  }

  // Sets the timeout of rounds that begin from now on; 0: the timeout that workers send.
  void SetTimeout(uint32_t ms) { timeout_ms_ = ms; }

 private:
  // Channel of the server.
  class Answers : public ServerChannel {
   public:
    explicit Answers(LoopJob* job) : job_(job) {}
    void Send(const Message& message) override {
      ps::MutexLock lock(&job_->mu_);
      const size_t rank = message.peer;
      if (rank >= job_->workers_.size() || !job_->workers_[rank]) return;
      job_->workers_[rank]->Take(message);
    }

   private:
    LoopJob* const job_;
  };

  class WorkerChannel : public ServerChannel {
   public:
    WorkerChannel(LoopJob* job, int rank) : job_(job), rank_(rank) {}

    void Start(ChannelUser* user) override {
      auto courier = std::make_shared<Courier>([user](Message* m) { user->OnMessage(m); });
      ps::MutexLock lock(&job_->mu_);
      if (job_->workers_.size() <= static_cast<size_t>(rank_)) job_->workers_.resize(rank_ + 1);
      job_->workers_[rank_] = std::move(courier);
    }
    void Stop() override {
      std::shared_ptr<Courier> mine;  // destroyed after the lock is released
      ps::MutexLock lock(&job_->mu_);
      if (job_->workers_.size() > static_cast<size_t>(rank_)) mine.swap(job_->workers_[rank_]);
    }
    int rank() const override { return rank_; }

    void Send(const Message& message) override {
      Message copy = message;
      copy.peer = rank_;
      // The values are copied, because they belong to the worker, and a server adds in place.
      copy.values = SharedBytes::New(message.values.size());
      memcpy(copy.values.data(), message.values.data(), message.values.size());
      if (job_->TakeAway(copy, rank_)) return;
      if (job_->timeout_ms_ > 0 && copy.op == kPushPull) {
        PushHeader header;
        PushHeader::Unpack(copy.body, &header);
        header.timeout_ms = job_->timeout_ms_;
        copy.body = header.Pack();
      }
      job_->requests_.Take(std::move(copy));
    }

   private:
    LoopJob* const job_;
    const int rank_;
  };

  bool TakeAway(const Message& push, int rank) {
    ps::MutexLock lock(&mu_);
    if (failing_rank_ != rank || push.values.empty()) return false;
    failing_rank_ = -1;
    workers_[rank]->Take(MakeAnswer(push.op, 0, push.key, push.number, failure_));
    return true;
  }

  std::atomic<uint32_t> timeout_ms_{0};
  ps::Mutex mu_;
  std::vector<std::shared_ptr<Courier>> workers_ PS_GUARDED_BY(mu_);
  int failing_rank_ PS_GUARDED_BY(mu_) = -1;
  std::string failure_ PS_GUARDED_BY(mu_);
  Answers answers_;
  SumServer server_;
  Courier requests_{[this](Message* message) { server_.OnMessage(message); }};
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_TESTS_SUPPORT_KIT_H_
