// A GPU in time that a seed decides: what byteps/device/device.h declares, in place of fake.cc.
//
// A thread of the job does the streams' work, one piece at a time, from whichever stream the seed
// picks.  Streams, events and pinned memory live as long as the process, as the engine keeps them:
// MakeGpu makes all that a job uses, so that each seed finds the same.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/device/device.h"
#include "byteps/engine/staged_sum.h"
#include "job.h"
#include "world.h"

namespace byteps {
namespace core {

// Who waits for it waits for what it was recorded for last by then, whatever it is recorded for
// later, on whichever stream.
struct Event {
  uint64_t recorded = 0;  // so often
  std::set<uint64_t> pending;

  bool IsDone(uint64_t number) const { return pending.count(number) == 0; }
};

struct Work {
  const Event* waits_for = nullptr;  // as it was recorded this time
  uint64_t number = 0;
  bool takes_time = false;
  std::function<void()> then;
  const DeviceWord* word = nullptr;  // until it is 1

  bool MayBegin() const {
    if (word != nullptr) return *word == 1;
    return waits_for == nullptr || waits_for->IsDone(number);
  }
};

struct Stream {
  std::deque<Work> work;
  bool working = false;
};

namespace {

constexpr auto kLook = std::chrono::microseconds(10);
constexpr auto kLookForWord = std::chrono::microseconds(500);
constexpr uint64_t kLongestUs = 300;  // that a copy takes

// All of them are one thread's at a time, but for the wait for more.
std::mutex mu;
std::condition_variable more;
std::vector<Stream*>* const streams = new std::vector<Stream*>;

Stream* StreamOf(DeviceStream stream) { return static_cast<Stream*>(stream); }
Event* EventOf(DeviceEvent event) { return static_cast<Event*>(event); }

void Enqueue(DeviceStream stream, Work work) {
  {
    std::lock_guard<std::mutex> lock(mu);
    StreamOf(stream)->work.push_back(std::move(work));
  }
  more.notify_one();
}

void CopyBytes(void* to, const void* from, size_t bytes, DeviceStream stream) {
  Enqueue(stream, {nullptr, 0, true, [=] { memcpy(to, from, bytes); }});
}

}  // namespace

CurrentDevice::CurrentDevice(int) {}
CurrentDevice::~CurrentDevice() {}

DeviceStream MakeStream() {
  streams->push_back(new Stream);
  return streams->back();
}

DeviceEvent MakeEvent() { return new Event; }

void RecordEvent(DeviceEvent event, DeviceStream stream) {
  Event* const recorded = EventOf(event);
  const uint64_t number = ++recorded->recorded;
  recorded->pending.insert(number);
  Enqueue(stream, {nullptr, 0, false, [=] { recorded->pending.erase(number); }});
}

bool EventIsDone(DeviceEvent event) {
  // A thread that asks over and over lets time pass.
  std::this_thread::sleep_for(kLook);
  return EventOf(event)->IsDone(EventOf(event)->recorded);
}

bool StreamIsIdle(DeviceStream stream) {
  return StreamOf(stream)->work.empty() && !StreamOf(stream)->working;
}

void WaitForEvent(DeviceStream stream, DeviceEvent event) {
  Enqueue(stream, {EventOf(event), EventOf(event)->recorded, false, [] {}});
}

void WaitForWord(DeviceStream stream, const DeviceWord* word) {
  Enqueue(stream, {nullptr, 0, false, [] {}, word});
}

void CopyToHost(void* host, const void* device, size_t bytes, DeviceStream stream) {
  CopyBytes(host, device, bytes, stream);
}

void CopyToDevice(void* device, const void* host, size_t bytes, DeviceStream stream) {
  CopyBytes(device, host, bytes, stream);
}

void CallWhenDone(DeviceStream stream, std::function<void()> then) {
  Enqueue(stream, {nullptr, 0, false, std::move(then)});
}

void* PinMemory(size_t bytes) { return aligned_alloc(4096, (bytes + 4095) / 4096 * 4096); }

}  // namespace core

namespace simulation {

using core::streams;

namespace {

core::DeviceStream user_stream = nullptr;

}  // namespace

void MakeGpu(uint64_t pinned_bytes, uint64_t streamed_bytes, uint64_t largest) {
  user_stream = core::MakeStream();
  core::DeviceCopies* const copies = core::DeviceCopies::Of(kGpu);
  copies->CallAfter(nullptr, user_stream, [] {});  // makes a stream for its calls
  for (core::Stream* stream : *streams) stream->work.clear();
  using core::PinnedPool;
  PinnedPool::Shared(PinnedPool::Use::kPartitions, pinned_bytes, largest)->Reserve(pinned_bytes);
  const uint64_t block = core::StagedSum::LargestBlock(streamed_bytes, largest);
  PinnedPool::Shared(PinnedPool::Use::kStreamedSums, streamed_bytes, block)
      ->Reserve(streamed_bytes);
}

core::DeviceStream UserStream() { return user_stream; }

void Compute(std::function<void()> work) {
  core::Enqueue(user_stream, {nullptr, 0, true, std::move(work)});
}

Gpu::Gpu() {
  thread_ = std::thread([this] { Run(); });
  pthread_setname_np(thread_.native_handle(), "gpu");
}

Gpu::~Gpu() {
  {
    std::lock_guard<std::mutex> lock(core::mu);
    stopping_ = true;
  }
  core::more.notify_one();
  thread_.join();
}

void Gpu::AwaitIdle() {
  const auto is_idle = [](core::Stream* stream) { return core::StreamIsIdle(stream); };
  while (!std::all_of(streams->begin(), streams->end(), is_idle)) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void Gpu::Run() {
  while (core::Stream* const stream = Next()) {
    core::Work work = std::move(stream->work.front());
    stream->work.pop_front();
    stream->working = true;
    if (work.takes_time) {
      std::this_thread::sleep_for(std::chrono::microseconds(1 + Random(core::kLongestUs)));
    }
    work.then();
    work = core::Work();
    stream->working = false;
  }
}

core::Stream* Gpu::Next() {
  std::unique_lock<std::mutex> lock(core::mu);
  while (true) {
    std::vector<core::Stream*> ready;
    bool idle = true, for_word = false;
    for (core::Stream* stream : *streams) {
      idle = idle && stream->work.empty();
      for_word = for_word || (!stream->work.empty() && stream->work.front().word != nullptr);
      if (!stream->work.empty() && stream->work.front().MayBegin()) ready.push_back(stream);
    }
    if (!ready.empty()) return ready[Random(ready.size())];
    if (idle && stopping_) return nullptr;
    if (for_word) {  // which nobody tells of
      core::more.wait_for(lock, core::kLookForWord);
    } else {
      core::more.wait(lock);
    }
  }
}

namespace {

// ----- a worker's script

// The tensor number of the gradients.
constexpr uint64_t kGradients = 7;
// And of the burst, which a worker begins within this time.
constexpr int kBurst = 9;
constexpr uint64_t kLatestBurstMs = 1000;

// Another one in each generation, so that a push of an older one would be seen in a sum.
float InputOf(uint64_t incarnation, uint64_t rank, uint64_t tensor, uint64_t round,
              uint64_t index) {
  return static_cast<float>(
      (incarnation * 15485863 + rank * 7919 + tensor * 104729 + round * 1299709 + index * 31) %
      200'003);
}

// What all ranks do in a round, without having to agree on it.
uint64_t ChoiceOf(int incarnation, int round, uint64_t below) {
  const uint64_t seed[] = {static_cast<uint64_t>(incarnation), static_cast<uint64_t>(round)};
  return core::HashBytes(seed, sizeof(seed), 1) % below;
}

std::string Packed(core::Verdict verdict) { return std::string(1, static_cast<char>(verdict)); }

std::shared_ptr<const core::UpdateRule> RuleOf(uint64_t elements, bool speculative) {
  auto rule = std::make_shared<core::UpdateRule>();
  rule->algorithm = core::UpdateRule::kSgd;
  rule->speculative = speculative;
  rule->groups = {{0.5, 0, 0, false}};
  rule->segments = {{elements, 0}};
  return rule;
}

}  // namespace

WorkerScript::WorkerScript(const Plan* plan, const Part& part, core::Worker* worker, Gpu* gpu)
    : plan_(*plan), part_(part), worker_(worker), gpu_(gpu) {
  whole_.name = "parameters";
  whole_.bytes = plan_.parameters * sizeof(float);
  whole_.partition_bytes = static_cast<uint32_t>(whole_.bytes);
  whole_.rule = RuleOf(plan_.parameters, true);
  expected_ = std::make_unique<core::PartitionState>(&whole_, 0);
}

void WorkerScript::Run() {
  if (plan_.updates) Load();
  if (plan_.burst > 0) Burst();
  for (int round = 0; round < part_.rounds; ++round) {
    Sums(round);
    if (plan_.updates) Update(round);
  }
}

bool WorkerScript::Await(int64_t handle) {
  const core::DeviceStream stream = gpu_ == nullptr ? nullptr : UserStream();
  try {
    if (!worker_->WaitFor(handle, stream, std::chrono::seconds(1000))) {
      wrong_ = "an operation was waited for without end";
    }
  } catch (const core::Error& e) {
    error_ = e.what();
  }
  if (gpu_ == nullptr) return error_.empty();
  gpu_->AwaitIdle();
  try {
    worker_->Check();  // of a sum that the stream has waited for
  } catch (const core::Error& e) {
    error_ = e.what();
  }
  return error_.empty();
}

void WorkerScript::AfterFailure() {
  const std::string error = error_;
  error_.clear();
  surely_ = false;
  if (plan_.goes_on && in_step_ && !worker_->failed()) return;
  worker_->Stop(false);
  if (gpu_ != nullptr) gpu_->AwaitIdle();
  throw core::Error(error);
}

void WorkerScript::Sums(int round) {
  std::vector<Sum> sums;
  for (int i = 0; i < plan_.tensors; ++i) sums.push_back({i, round, plan_.counts[i]});
  Start(sums);
}

void WorkerScript::Burst() {
  std::this_thread::sleep_for(std::chrono::milliseconds(Random(kLatestBurstMs)));
  std::vector<Sum> sums;
  for (int round = 0; round < plan_.burst; ++round) sums.push_back({kBurst, round, 1});
  Start(sums);
}

void WorkerScript::Start(const std::vector<Sum>& sums) {
  std::vector<Values*> tensors;
  std::vector<int64_t> handles;
  for (const Sum& sum : sums) {
    Values& values = memory_.emplace_back(sum.count);
    Values inputs(values.size());
    for (size_t k = 0; k < values.size(); ++k) {
      inputs[k] = InputOf(part_.incarnation, part_.rank, sum.tensor, sum.round, k);
    }
    core::PushPullRequest request;
    request.tensor.name = "t" + std::to_string(sum.tensor);
    request.tensor.bytes = values.size() * sizeof(float);
    request.tensor.average = false;
    request.input = request.output = values.data();
    request.priority = static_cast<int>(Random(3));
    if (gpu_ != nullptr && sum.tensor != kBurst) {
      request.tensor.device = kGpu;
      request.stream = UserStream();
      request.streamed = Random(2) == 0;
      Compute([&values, inputs] { values = inputs; });
    } else {
      values = inputs;
    }
    try {
      handles.push_back(worker_->PushPull(request));
      tensors.push_back(&values);
    } catch (const core::Error& e) {
      error_ = e.what();
      in_step_ = false;
      break;
    }
  }
  bool failed = !error_.empty();
  for (size_t i = 0; i < handles.size(); ++i) {
    const std::string before = error_;
    error_.clear();
    if (Await(handles[i])) {
      CheckSum(*tensors[i], sums[i].tensor, sums[i].round);
      error_ = before;
    }
    failed = failed || !error_.empty();
  }
  if (failed) AfterFailure();
}

void WorkerScript::CheckSum(const Values& values, int tensor, int round) {
  for (size_t k = 0; k < values.size(); ++k) {
    float wanted = 0;
    for (int rank = 0; rank < part_.workers; ++rank) {
      wanted += InputOf(part_.incarnation, rank, tensor, round, k);
    }
    if (values[k] == wanted) continue;
    wrong_ = "incarnation " + std::to_string(part_.incarnation) + ", tensor " +
             std::to_string(tensor) + ", round " + std::to_string(round) + ", element " +
             std::to_string(k) + " is " + std::to_string(values[k]) + ", not " +
             std::to_string(wanted);
    return;
  }
}

// ------------------------------------------------------------- parameters

core::PushPullRequest WorkerScript::Parameters() const {
  core::PushPullRequest request;
  request.tensor.name = "parameters";
  request.tensor.bytes = plan_.parameters * sizeof(float);
  request.tensor.average = false;
  request.tensor.rule = whole_.rule;
  return request;
}

int64_t WorkerScript::Ask(int op, const core::PushPullRequest& like, const std::string& detail) {
  core::PushPullRequest request = like;
  request.op = op;
  request.detail = detail;
  return worker_->PushPull(request);
}

// Rank 0 does, for all: no round is complete before it has pushed.
void WorkerScript::Load() {
  Values& values = memory_.emplace_back(plan_.parameters);
  for (size_t k = 0; k < values.size(); ++k) values[k] = InputOf(part_.incarnation, 0, 8, 0, k);
  expected_->Load(0, reinterpret_cast<const char*>(values.data()));
  if (part_.rank > 0) return;
  core::PushPullRequest request = Parameters();
  request.input = values.data();
  const uint32_t slot = 0;
  const std::string detail(reinterpret_cast<const char*>(&slot), sizeof(slot));
  try {
    Await(Ask(core::kLoadState, request, detail));
  } catch (const core::Error& e) {
    error_ = e.what();
    in_step_ = false;
  }
  if (!error_.empty()) AfterFailure();
}

core::UpdateStep WorkerScript::StepOf(int round, double scale) const {
  core::UpdateStep step;
  step.number = steps_ + 1;
  step.grad_scale = scale;
  step.rates = {{1.0 / 1024 / (1 + round % 2), 0}};
  return step;
}

void WorkerScript::Expect(const core::UpdateStep& step, int round) {
  Values sums(plan_.parameters);
  for (size_t k = 0; k < sums.size(); ++k) {
    for (int rank = 0; rank < part_.workers; ++rank) {
      sums[k] += InputOf(part_.incarnation, rank, kGradients, round, k);
    }
  }
  char* const at = reinterpret_cast<char*>(sums.data());
  expected_->Update(step, at, at);
  ++steps_;
}

void WorkerScript::CheckParameters(const Values& values, int round, const char* what) {
  if (!surely_) return;
  Values wanted(plan_.parameters);
  expected_->Stay(reinterpret_cast<char*>(wanted.data()));
  for (size_t k = 0; k < values.size(); ++k) {
    if (values[k] == wanted[k]) continue;
    wrong_ = "incarnation " + std::to_string(part_.incarnation) + ", " + what + " of round " +
             std::to_string(round) + ": parameter " + std::to_string(k) + " is " +
             std::to_string(values[k]) + ", not " + std::to_string(wanted[k]);
    return;
  }
}

void WorkerScript::Update(int round) {
  // 0: at once; 1: the norm first; 2 to 4: tried, and kept, clipped or dropped; 5: tried, and then
  // rank 0 loads other parameters.
  const uint64_t choice = ChoiceOf(part_.incarnation, round, 6);
  const std::string said = Packed(std::exchange(verdict_, core::Verdict::kNone));
  const double clipped = 0.25;
  Values& gradients = memory_.emplace_back(plan_.parameters);
  Values& parameters = memory_.emplace_back(plan_.parameters);
  auto& sums = sums_.emplace_back(1 + plan_.parameters * sizeof(float) / kPartitionBytes + 1);
  for (size_t k = 0; k < gradients.size(); ++k) {
    gradients[k] = InputOf(part_.incarnation, part_.rank, kGradients, round, k);
  }
  core::PushPullRequest request = Parameters();
  request.input = gradients.data();
  request.output = parameters.data();
  request.sums = sums.data();
  const core::UpdateStep whole = StepOf(round, 1);
  const core::UpdateStep small = StepOf(round, clipped);
  try {
    if (choice == 0) {
      if (Await(Ask(core::kPushStep, request, said + whole.Pack()))) Expect(whole, round);
    } else if (choice == 1) {
      core::PushPullRequest norm = request;
      norm.output = sums.data();
      if (Await(Ask(core::kPushNorm, norm, said)) &&
          Await(Ask(core::kStep, request, small.Pack()))) {
        Expect(small, round);
      }
    } else if (Await(Ask(core::kPushTry, request, said + whole.Pack()))) {
      if (choice == 3) {
        if (Await(Ask(core::kStep, request, small.Pack()))) Expect(small, round);
      } else if (choice == 4) {
        verdict_ = core::Verdict::kDrop;
        return;
      } else {
        verdict_ = core::Verdict::kKeep;
        Expect(whole, round);
      }
    }
  } catch (const core::Error& e) {
    error_ = e.what();
    in_step_ = false;
  }
  if (!error_.empty()) return AfterFailure();
  CheckParameters(parameters, round, "the step");
  if (choice != 5) return;
  // Whatever the others have said by then.
  steps_ = 0;
  if (part_.rank == 0) verdict_ = core::Verdict::kNone;
  Load();
}

}  // namespace simulation
}  // namespace byteps
