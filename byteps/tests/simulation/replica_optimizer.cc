#include "replica_optimizer.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "byteps/base/error.h"
#include "virtual_threads.h"

namespace byteps {
namespace simulation {
namespace {

constexpr double kClipped = 0.25;

// What all ranks do in a step.  0: at once; 1: the norm first; 2 to 4: tried, and kept, clipped or
// dropped.
uint64_t ChoiceOf(const ReplicaPlan& plan, int step) {
  const uint64_t seed[] = {plan.counts[0], static_cast<uint64_t>(step)};
  return core::HashBytes(seed, sizeof(seed), 1) % 5;
}

std::string Slot(uint32_t slot) {
  return std::string(reinterpret_cast<const char*>(&slot), sizeof(slot));
}

const char* Chars(const std::vector<float>& values) {
  return reinterpret_cast<const char*>(values.data());
}

}  // namespace

ReplicaOptimizer::ReplicaOptimizer(const ReplicaPlan* plan, int rank, core::Worker* worker,
                                   Witness* witness)
    : plan_(*plan), rank_(rank), worker_(worker), witness_(witness) {
  const uint64_t count = plan_.parameters;
  auto rule = std::make_shared<core::UpdateRule>();
  rule->algorithm = core::UpdateRule::kSgd;
  rule->speculative = true;
  rule->groups = {{0.5, 0, 0, false}};
  rule->segments = {{count, 0}};
  whole_.name = "parameters";
  whole_.bytes = count * sizeof(float);
  whole_.partition_bytes = worker_->PartitionBytes(core::DType::kFloat32, whole_.bytes, 0, true);
  whole_.rule = rule;
  for (int i = 0; i < plan_.replicas; ++i) {
    whole_.group.push_back(i * plan_.ranks + rank_ % plan_.ranks);
  }
  Values first(count);
  for (size_t k = 0; k < count; ++k) first[k] = static_cast<float>(k % 1009) - 500;
  for (size_t i = 0; i < whole_.NumPartitions(); ++i) {
    expected_.push_back(std::make_unique<core::PartitionState>(&whole_, i));
    expected_[i]->Load(0, Chars(first) + i * whole_.partition_bytes);
  }
  sums_.resize(whole_.NumPartitions());
}

core::PushPullRequest ReplicaOptimizer::Request() const {
  core::PushPullRequest request;
  request.tensor.name = whole_.name;
  request.tensor.bytes = whole_.bytes;
  request.tensor.average = false;
  request.tensor.group = whole_.group;
  request.tensor.rule = whole_.rule;
  return request;
}

void ReplicaOptimizer::Await(int op, core::PushPullRequest request, const std::string& detail) {
  request.op = op;
  request.detail = detail;
  if (!worker_->WaitFor(worker_->PushPull(request), nullptr, std::chrono::seconds(1000))) {
    witness_->Wrong("an update was waited for without end");
  }
}

void ReplicaOptimizer::Load() {
  Values& values = memory_.emplace_back(plan_.parameters);
  for (size_t i = 0; i < expected_.size(); ++i) {
    expected_[i]->Stay(reinterpret_cast<char*>(values.data()) + i * whole_.partition_bytes);
  }
  core::PushPullRequest request = Request();
  request.input = values.data();
  Await(core::kLoadState, request, Slot(0));
}

std::string ReplicaOptimizer::TakeVerdict() {
  return std::string(1, static_cast<char>(std::exchange(verdict_, core::Verdict::kNone)));
}

core::UpdateStep ReplicaOptimizer::StepOf(int step, double scale) const {
  core::UpdateStep made;
  made.number = steps_ + 1;
  made.grad_scale = scale;
  made.rates = {{1.0 / 1024 / (1 + step % 2), 0}};
  return made;
}

void ReplicaOptimizer::Step(int step, int life) {
  const std::string said = TakeVerdict();
  Values& gradients = memory_.emplace_back(plan_.parameters);
  Values& parameters = memory_.emplace_back(plan_.parameters);
  for (size_t k = 0; k < gradients.size(); ++k) {
    gradients[k] = InputOf(rank_, life, step, kTensor, k);
  }
  core::PushPullRequest request = Request();
  request.input = gradients.data();
  request.output = parameters.data();
  request.sums = sums_.data();
  const core::UpdateStep whole = StepOf(step, 1), small = StepOf(step, kClipped);
  asked_ = whole;
  drops_ = false;
  switch (ChoiceOf(plan_, step)) {
    case 0:
      Await(core::kPushStep, request, said + whole.Pack());
      break;
    case 1: {
      core::PushPullRequest norm = request;
      norm.output = sums_.data();
      Await(core::kPushNorm, norm, said);
      Await(core::kStep, request, small.Pack());
      asked_ = small;
      break;
    }
    case 2:
      Await(core::kPushTry, request, said + whole.Pack());
      verdict_ = core::Verdict::kKeep;
      break;
    case 3:
      Await(core::kPushTry, request, said + whole.Pack());
      Await(core::kStep, request, small.Pack());
      asked_ = small;
      break;
    default:
      Await(core::kPushTry, request, said + whole.Pack());
      verdict_ = core::Verdict::kDrop;
      drops_ = true;
  }
  parameters_ = parameters;
}

bool ReplicaOptimizer::SumOf(int step, size_t partition, uint32_t without, Values* sum) const {
  const size_t begin = partition * (whole_.partition_bytes / sizeof(float));
  const int present = plan_.replicas - __builtin_popcount(without);
  for (size_t k = 0; k < sum->size(); ++k) {
    double value = 0;
    for (int i = 0; i < plan_.replicas; ++i) {
      if ((without >> i & 1) != 0) continue;
      const int rank = static_cast<int>(whole_.group[i]);
      const int life = witness_->LifeAt(rank, step);
      if (life == 0) return false;
      value += InputOf(rank, life, step, kTensor, begin + k);
    }
    (*sum)[k] = static_cast<float>(value * plan_.replicas / present);
  }
  return true;
}

uint32_t ReplicaOptimizer::Check(int step, uint32_t named, Lists* lists) {
  uint32_t lacks = 0;
  for (size_t i = 0; i < expected_.size(); ++i) {
    const size_t count = whole_.PartitionSize(i) / sizeof(float);
    const float* const got = parameters_.data() + i * (whole_.partition_bytes / sizeof(float));
    Values sum(count), made(count);
    bool found = false;
    for (uint32_t without = 0; without + 1 < (1u << plan_.replicas) && !found; ++without) {
      if ((without & ~named) != 0 || !SumOf(step, i, without, &sum)) continue;
      expected_[i]->Preview(asked_, Chars(sum), reinterpret_cast<char*>(made.data()));
      found = memcmp(got, made.data(), whole_.PartitionSize(i)) == 0;
      if (!found) continue;
      lacks |= without;
      (*lists)[{kTensor, i}] = without;
      char* const at = reinterpret_cast<char*>(sum.data());
      if (!drops_) expected_[i]->Update(asked_, at, at);
    }
    if (!found) {
      witness_->Wrong("the parameters after step " + std::to_string(step) + " at worker " +
                      std::to_string(rank_) + " are those of no list of members");
    }
  }
  if (!drops_) ++steps_;
  return lacks;
}

uint64_t ReplicaOptimizer::Digest() const {
  const Values state = State();
  return core::HashBytes(state.data(), state.size() * sizeof(float), 1);
}

void ReplicaOptimizer::Settle() {
  if (verdict_ == core::Verdict::kNone) return;
  Values& nothing = memory_.emplace_back(1);
  // It is said again with the next push.
  Read(0, &nothing, std::string(1, static_cast<char>(verdict_)));
}

void ReplicaOptimizer::Read(uint64_t end, Values* values, const std::string& verdict) {
  core::PushPullRequest request = Request();
  request.output = values->data();
  request.pull_end = end;
  Await(core::kReadState, request, verdict + Slot(0));
}

ReplicaOptimizer::Values ReplicaOptimizer::State() const {
  Values state;
  for (uint32_t slot = 0; slot < whole_.NumSlots(); ++slot) {
    for (const auto& one : expected_) {
      Values values(one->size());
      one->Read(slot, 0, values.size() * sizeof(float), reinterpret_cast<char*>(values.data()));
      state.insert(state.end(), values.begin(), values.end());
    }
  }
  state.push_back(static_cast<float>(steps_));
  return state;
}

void ReplicaOptimizer::Join(const Values& donors) {
  Values& parameters = memory_.emplace_back(plan_.parameters);
  Read(whole_.bytes, &parameters, std::string(1, static_cast<char>(core::Verdict::kNone)));
  if (!std::equal(parameters.begin(), parameters.end(), donors.begin())) {
    witness_->Wrong("worker " + std::to_string(rank_) +
                    " joins, and the servers have other parameters than its donor");
  }
  const char* at = Chars(donors);
  for (uint32_t slot = 0; slot < whole_.NumSlots(); ++slot) {
    for (const auto& one : expected_) {
      one->Load(slot, at);
      at += one->size() * sizeof(float);
    }
  }
  steps_ = static_cast<uint64_t>(donors.back());
}

}  // namespace simulation
}  // namespace byteps
