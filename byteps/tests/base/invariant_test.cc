// Tests of broken invariants, and of the clock that stands still with the process. Tests named
// Invariant break invariants on purpose; other tests must not.
#include "byteps/base/invariant.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/mutex.h"
#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/base/stall_watch.h"
#include "byteps/cluster/channel.h"
#include "byteps/engine/push_scheduler.h"
#include "byteps/engine/requests.h"
#include "byteps/server/sum_server.h"
#include "tests/support/job.h"
#include "tests/support/kit.h"

namespace byteps {
namespace core {
namespace {

uint64_t on_purpose = 0;

// Invariants that break while this object exists are broken on purpose.
class OnPurpose {
 public:
  OnPurpose() : before_(ps::NumBrokenInvariants()) {}
  ~OnPurpose() { on_purpose += count(); }
  uint64_t count() const { return ps::NumBrokenInvariants() - before_; }

 private:
  const uint64_t before_;
};

class NoneBroken : public ::testing::Environment {
 public:
  void TearDown() override {
    EXPECT_EQ(ps::NumBrokenInvariants(), on_purpose) << ps::BrokenInvariants().last;
  }
};
[[maybe_unused]] const auto* const environment =
    ::testing::AddGlobalTestEnvironment(new NoneBroken);

// Returns the message of the Error that `broken` throws.
template <typename Function>
std::string ErrorOf(Function broken) {
  try {
    broken();
  } catch (const Error& e) {
    return e.what();
  }
  return "nothing";
}

TensorPtr TensorOf(uint64_t bytes) {
  auto tensor = std::make_shared<Tensor>();
  tensor->declaration.name = "x";
  tensor->declaration.bytes = bytes;
  tensor->declaration.partition_bytes = kPage;
  return tensor;
}

OperationPtr OperationOf(uint64_t bytes) {
  PushPullRequest request;
  request.tensor.name = "x";
  request.tensor.bytes = bytes;
  return std::make_shared<Operation>(request, TensorOf(bytes));
}

TEST(Invariant, ThatHoldsCostsNothingButTheLook) {
  OnPurpose broken;
  int made = 0;
  const auto text = [&made] { return std::to_string(++made); };
  BPS_INVARIANT("holds", broken.count() == 0, text());
  BPS_INVARIANT_NOTED("holds", broken.count() == 0, text());
  EXPECT_EQ(made, 0);
  EXPECT_EQ(broken.count(), 0u);
}

TEST(Invariant, ThatIsBrokenIsNamedAndCounted) {
  OnPurpose broken;
  const std::string error =
      ErrorOf([] { BPS_INVARIANT("two is more than three", 2 > 3, "2 and 3"); });
  EXPECT_TRUE(Has(error, "the invariant 'two is more than three' was broken: 2 and 3")) << error;
  EXPECT_EQ(ps::BrokenInvariants().last, error);
  EXPECT_THROW(BPS_INVARIANT("one is two", 1 == 2, "1"), Error);
  BPS_INVARIANT_NOTED("one is three", 1 == 3, "1");
  EXPECT_TRUE(Has(ps::BrokenInvariants().last, "one is three"));
  EXPECT_EQ(broken.count(), 3u);
}

TEST(Invariant, AWindowIsNeverBelowZero) {
  OnPurpose broken;
  PushScheduler scheduler(2, 0);
  scheduler.Return(1, 100);
  EXPECT_TRUE(Has(ps::BrokenInvariants().last, "'a window is never below zero'"));
  EXPECT_TRUE(Has(ps::BrokenInvariants().last, "100 bytes left the window of server 1"));
  EXPECT_EQ(scheduler.under_way(), 0u);
  EXPECT_EQ(broken.count(), 1u);
}

TEST(Invariant, ARequestIsAnsweredOnce) {
  OnPurpose broken;
  Requests requests;
  const uint64_t number = requests.Remember({});
  Request taken;
  EXPECT_TRUE(requests.Take(number, &taken));
  const std::string error = ErrorOf([&] { requests.Take(number, &taken); });
  EXPECT_TRUE(Has(error, "'a request is answered once'")) << error;
  EXPECT_TRUE(Has(ErrorOf([&] { requests.Take(77, &taken); }), "request 77 of 1"));
  requests.Clear();  // the job has ended meanwhile
  EXPECT_FALSE(requests.Take(number, &taken));
  EXPECT_EQ(broken.count(), 2u);
}

TEST(Invariant, APartitionIsInOneStage) {
  using Stage = Operation::Stage;
  for (const uint64_t bytes : {1000, 3 * kPage}) {
    OnPurpose broken;
    const OperationPtr operation = OperationOf(bytes);
    const uint64_t last = (bytes - 1) / kPage;
    operation->Move(last, Stage::kTaken);
    operation->Move(last, Stage::kPushed);
    const std::string error = ErrorOf([&] { operation->Move(last, Stage::kPushed); });
    EXPECT_TRUE(Has(error, "'a partition is in one stage'")) << error;
    EXPECT_TRUE(Has(error, "partition " + std::to_string(last) + " of 'x'")) << error;
    for (uint64_t i = 0; i <= last; ++i) EXPECT_EQ(operation->CountPartition(i), i == last);
    EXPECT_NE(ErrorOf([&] { operation->CountPartition(0); }), "nothing");
    EXPECT_EQ(broken.count(), 2u);
  }
}

TEST(Invariant, AnOperationEndsOnce) {
  OnPurpose broken;
  const OperationPtr operation = OperationOf(1000);
  operation->End("", nullptr);
  operation->End("again", nullptr);
  EXPECT_TRUE(Has(ps::BrokenInvariants().last, "'an operation ends once'"));
  operation->EndWriting();
  EXPECT_TRUE(Has(ps::BrokenInvariants().last, "'a writer that stops had begun'"));
  EXPECT_EQ(broken.count(), 2u);
}

// A server answers twice. The transport notices that, and ends the job with this text.
TEST(Invariant, ThatIsBrokenInAJobFailsIt) {
  OnPurpose broken;
  Script script;
  script.answers_twice = true;
  Job job(1, script);
  auto values = Values(100, 1);
  std::string error = job.ErrorOf(job.Start("x", &values));  // an early answer may succeed
  while (error == "it was well") {
    try {
      error = job.ErrorOf(job.Start("x", &values));
    } catch (const Error& e) {
      error = e.what();
    }
  }
  EXPECT_TRUE(Has(error, "'a request is answered once'")) << error;
  EXPECT_TRUE(job.worker.failed());
  EXPECT_GE(job.Metric("broken_invariants_total"), static_cast<double>(broken.count()));
}

// After any exception of a transport, the operation fails, and its share of the window is free.
TEST(Invariant, ThatIsBrokenWhileSendingFailsTheOperation) {
  Job job(1);
  auto values = Values(3000, 1);
  job.Wait(job.Start("x", &values));
  for (const uint64_t bytes : {100, 3000}) {
    values.resize(bytes);
    OnPurpose broken;
    const std::string name = "y" + std::to_string(bytes);
    job.worker.Declare({Job::RequestFor(name, &values).tensor});
    job.channel->Change([](Script* s) {
      s->on_push = [] { BPS_INVARIANT("what is sent is sound", false, "as the script says"); };
    });
    const std::string error = job.ErrorOf(job.Start(name, &values));
    EXPECT_TRUE(Has(error, "'what is sent is sound'")) << error;
    job.channel->Change([](Script* s) { s->on_push = nullptr; });
    EXPECT_TRUE(job.Settles("transport_partitions", 0));
    EXPECT_GE(broken.count(), 1u);
  }
}

// The process goes on after any exception, in the caller's thread and in a push loop, which sends
// the longer tensor.
TEST(Invariant, AnyExceptionWhileSendingFailsTheOperation) {
  Job job(1);
  auto values = Values(3000, 1);
  for (const uint64_t count : {100, 30000}) {
    values.resize(count);
    const std::string name = "z" + std::to_string(count);
    job.worker.Declare({Job::RequestFor(name, &values).tensor});
    job.channel->Change([](Script* s) { s->on_push = [] { throw std::bad_alloc(); }; });
    EXPECT_TRUE(Has(job.ErrorOf(job.Start(name, &values)), "bad_alloc"));
    job.channel->Change([](Script* s) { s->on_push = nullptr; });
    EXPECT_TRUE(job.Settles("transport_partitions", 0));
    job.Wait(job.Start(name + "again", &values));
  }
}

// A channel that fails to send the first answer.
class BrokenAnswers : public ServerChannel {
 public:
  void Send(const Message& message) override {
    ps::MutexLock lock(&mu_);
    BPS_INVARIANT("what is sent is sound", !std::exchange(breaks_, false), "as the test says");
    errors_[message.peer] = message.failed ? message.body : "none";
  }
  void BreakNext() {
    ps::MutexLock lock(&mu_);
    breaks_ = true;
  }
  // Errors of the last answers, by receiver.
  std::map<int, std::string> errors() {
    ps::MutexLock lock(&mu_);
    return errors_;
  }

 private:
  ps::Mutex mu_;
  bool breaks_ PS_GUARDED_BY(mu_) = true;
  std::map<int, std::string> errors_ PS_GUARDED_BY(mu_);
};

TEST(Invariant, ThatIsBrokenInAServerFailsTheRound) {
  OnPurpose broken;
  BrokenAnswers channel;
  SumServer server(ConfigWith({}), &channel);
  Declaration declaration;
  declaration.name = "x";
  declaration.bytes = declaration.partition_bytes = 400;
  declaration.group = {0, 1};
  const auto tell = [&](int rank, Message request) {
    request.peer = rank;
    server.OnMessage(&request);
  };
  EXPECT_THROW(
      tell(0, MakeRequest(kDeclare, 0, declaration.Key(), 1, PackDeclarations({declaration}))),
      Error);  // the transport closes the connection
  channel.BreakNext();
  for (int rank = 0; rank < 2; ++rank) {
    PushHeader header;
    header.timeout_ms = 600'000;
    header.pull_bytes = 400;
    Message request = MakeRequest(kPushPull, 0, declaration.Key(), 2 + rank, header.Pack());
    const SharedBytes values = SharedBytes::New(400);
    memset(values.data(), 0, 400);
    request.SetValues(values);
    tell(rank, std::move(request));
  }
  // The server's own thread may serve the second request.
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while ((channel.errors().size() < 2 || server.OpenRounds() > 0) &&
         std::chrono::steady_clock::now() < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (const auto& [receiver, error] : channel.errors()) {
    EXPECT_TRUE(Has(error, "'what is sent is sound'")) << receiver << ": " << error;
  }
  EXPECT_EQ(channel.errors().size(), 2u);
  EXPECT_EQ(server.OpenRounds(), 0u);
}

}  // namespace
}  // namespace core
}  // namespace byteps

namespace ps {
namespace {

// ----- a clock, with times from the test

using std::chrono::milliseconds;
using std::chrono::seconds;

class Stalls : public testing::Test {
 protected:
  // The feeding thread wakes up regularly for this time.
  void Run(StallWatch::Duration time) {
    const StallWatch::Time end = now_ + time;
    while (now_ < end) {
      now_ = std::min(end, now_ + StallWatch::TickTime(kHeartbeat));
      watch_.Tick(now_);
    }
  }
  void StandStill(StallWatch::Duration time) { now_ += time; }
  StallWatch::Duration Awake() { return watch_.AwakeAt(now_).time_since_epoch(); }

  static constexpr StallWatch::Duration kHeartbeat = seconds(5);
  static constexpr StallWatch::Duration kTolerance = seconds(1);
  StallWatch watch_;
  StallWatch::Time now_{seconds(1000)};
};

TEST_F(Stalls, WithoutAThreadThatTellsItIsTheSteadyClock) {
  EXPECT_EQ(Awake(), seconds(1000));
  StandStill(seconds(40));
  EXPECT_EQ(Awake(), seconds(1040));
}

TEST_F(Stalls, TimePassesWhileTheProcessRuns) {
  watch_.Begin(kHeartbeat, now_);
  Run(seconds(100));
  EXPECT_EQ(Awake(), seconds(1100));
  StandStill(milliseconds(400));  // happens on a busy machine
  EXPECT_EQ(Awake(), seconds(1100) + milliseconds(400));
  Run(seconds(1));
  EXPECT_EQ(Awake(), seconds(1101) + milliseconds(400));
  EXPECT_EQ(watch_.StoodStill(seconds(1000), now_), seconds(0));
}

TEST_F(Stalls, APauseAndAHeartbeatDoNotCount) {
  watch_.Begin(kHeartbeat, now_);
  Run(seconds(10));
  StandStill(seconds(40));
  // Any thread may read the clock before the feeding thread ticks.
  EXPECT_EQ(Awake(), seconds(1010) + kTolerance);
  watch_.Tick(now_);
  EXPECT_EQ(Awake(), seconds(1010) + kTolerance);
  Run(kHeartbeat);
  EXPECT_EQ(Awake(), seconds(1010) + kTolerance) << "what has come is read first";
  Run(seconds(7));
  EXPECT_EQ(Awake(), seconds(1017) + kTolerance);
}

TEST_F(Stalls, AShortPauseGivesAShortGrace) {
  watch_.Begin(kHeartbeat, now_);
  StandStill(kTolerance + milliseconds(100));
  watch_.Tick(now_);
  EXPECT_EQ(Awake(), seconds(1000) + kTolerance);
  Run(seconds(1));
  EXPECT_EQ(Awake(), seconds(1001) + kTolerance - milliseconds(100));
}

TEST_F(Stalls, ItTellsForHowLongItStoodStill) {
  watch_.Begin(kHeartbeat, now_);
  Run(seconds(3));
  StandStill(seconds(40));
  EXPECT_EQ(watch_.StoodStill(seconds(30), now_), seconds(40)) << "whichever thread asks first";
  Run(seconds(2));
  StandStill(seconds(3));  // the system may let the process run for a moment in between
  watch_.Tick(now_);
  EXPECT_EQ(watch_.StoodStill(seconds(30), now_), seconds(40));
  Run(seconds(31));
  EXPECT_EQ(watch_.StoodStill(seconds(30), now_), seconds(0));
}

TEST_F(Stalls, NeverBack) {
  watch_.Begin(kHeartbeat, now_);
  auto last = Awake();
  for (int i = 0; i < 200; ++i) {
    if (i % 3 == 0) StandStill(milliseconds(37 * i));
    if (i % 7 == 0) {
      watch_.Tick(now_);
    } else {
      Run(milliseconds(100));
    }
    EXPECT_GE(Awake(), last);
    last = Awake();
  }
  watch_.End(now_);
  EXPECT_GE(Awake(), last);
}

// A reader of a partial update would see the clock jump by a pause, or go back.
TEST_F(Stalls, ReadersSeeWholeChanges) {
  watch_.Begin(kHeartbeat, now_);
  constexpr StallWatch::Time kLater{seconds(1'000'000'000)};
  constexpr StallWatch::Duration kPause = seconds(100);
  // Time by which the clock advances in one loop: the part of the pause that counts, and the run
  // after the pause.
  constexpr StallWatch::Duration kCounted = 2 * kTolerance;
  std::atomic<int> pauses{0};
  std::atomic<bool> ended{false};
  std::atomic<int> leaps{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      StallWatch::Duration last{};
      while (!ended) {
        const auto read = watch_.AwakeAt(kLater).time_since_epoch();
        if (read > seconds(1000) + pauses.load() * kCounted + kPause / 2 || read < last) ++leaps;
        last = read;
      }
    });
  }
  for (; pauses < 300'000; ++pauses) {
    StandStill(kPause);
    watch_.Tick(now_);
    Run(kHeartbeat + kTolerance);
  }
  ended = true;
  for (auto& reader : readers) reader.join();
  EXPECT_EQ(leaps, 0);
}

}  // namespace
}  // namespace ps
