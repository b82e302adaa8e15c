// Script of a worker in a simulated job: sums, and steps of parameters that servers keep.
#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/engine/worker.h"
#include "job.h"
#include "world.h"

namespace byteps {
namespace simulation {
namespace {

// Tensor number of the gradients.
constexpr uint64_t kGradients = 7;
// Tensor number of the burst, which a worker begins within kLatestBurstMs.
constexpr int kBurst = 9;
constexpr uint64_t kLatestBurstMs = 1000;

// Depends on the generation, so that pushes of an older one would change a sum.
float InputOf(uint64_t generation, uint64_t rank, uint64_t tensor, uint64_t round, uint64_t index) {
  return static_cast<float>(
      (generation * 15485863 + rank * 7919 + tensor * 104729 + round * 1299709 + index * 31) %
      200'003);
}

// Returns a pseudo-random number below `below`. All ranks get the same one without communication.
uint64_t ChoiceOf(int generation, int round, uint64_t below) {
  const uint64_t seed[] = {static_cast<uint64_t>(generation), static_cast<uint64_t>(round)};
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
    if (!plan_.updates) continue;
    Update(round);
    if (!plan_.Releases(kGradients, round)) continue;
    worker_->Release({"parameters"}, 0);
    steps_ = 0;
    verdict_ = core::Verdict::kNone;
    if (round + 1 < part_.rounds) Load();
  }
}

void WorkerScript::Release(const std::vector<Sum>& sums) {
  for (const Sum& sum : sums) {
    if (sum.tensor == kBurst || !plan_.Releases(sum.tensor, sum.round)) continue;
    worker_->Release({"t" + std::to_string(sum.tensor)}, 0);
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
    worker_->Check();  // throws if the sum failed that the stream has waited for
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
  throw core::Error(error);
}

void WorkerScript::Sums(int round) {
  std::vector<Sum> sums;
  for (int i = 0; i < plan_.tensors; ++i) sums.push_back({i, round, plan_.CountAt(i, round)});
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
  const bool in_flight = Random(2) == 0;  // releases names before their sums have ended
  for (const Sum& sum : sums) {
    Values& values = memory_.emplace_back(sum.count);
    Values inputs(values.size());
    for (size_t k = 0; k < values.size(); ++k) {
      inputs[k] = InputOf(part_.generation, part_.rank, sum.tensor, sum.round, k);
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
  if (in_flight) Release(sums);
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
  if (!in_flight) Release(sums);
  if (failed) AfterFailure();
}

void WorkerScript::CheckSum(const Values& values, int tensor, int round) {
  for (size_t k = 0; k < values.size(); ++k) {
    float wanted = 0;
    for (int rank = 0; rank < part_.workers; ++rank) {
      wanted += InputOf(part_.generation, rank, tensor, round, k);
    }
    if (values[k] == wanted) continue;
    wrong_ = "generation " + std::to_string(part_.generation) + ", tensor " +
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

// Called by rank 0, for all: no round is complete before it has pushed.
void WorkerScript::Load() {
  Values& values = memory_.emplace_back(plan_.parameters);
  for (size_t k = 0; k < values.size(); ++k) values[k] = InputOf(part_.generation, 0, 8, 0, k);
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
      sums[k] += InputOf(part_.generation, rank, kGradients, round, k);
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
    wrong_ = "generation " + std::to_string(part_.generation) + ", " + what + " of round " +
             std::to_string(round) + ": parameter " + std::to_string(k) + " is " +
             std::to_string(values[k]) + ", not " + std::to_string(wanted[k]);
    return;
  }
}

void WorkerScript::Update(int round) {
  // Kind of the step. 0: made at once; 1: the norm first; 2 to 4: speculative, then kept, clipped
  // or dropped; 5: speculative, then rank 0 loads other parameters.
  const uint64_t choice = ChoiceOf(part_.generation, round, 6);
  const std::string said = Packed(std::exchange(verdict_, core::Verdict::kNone));
  const double clipped = 0.25;
  Values& gradients = memory_.emplace_back(plan_.parameters);
  Values& parameters = memory_.emplace_back(plan_.parameters);
  auto& sums = sums_.emplace_back(1 + plan_.parameters * sizeof(float) / kPartitionBytes + 1);
  for (size_t k = 0; k < gradients.size(); ++k) {
    gradients[k] = InputOf(part_.generation, part_.rank, kGradients, round, k);
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
  // After the load, verdicts of other ranks no longer matter.
  steps_ = 0;
  if (part_.rank == 0) verdict_ = core::Verdict::kNone;
  Load();
}

}  // namespace simulation
}  // namespace byteps
