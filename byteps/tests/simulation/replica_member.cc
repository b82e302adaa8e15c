#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "byteps/base/invariant.h"
#include "replica_job.h"
#include "world.h"

namespace byteps {
namespace simulation {
namespace {

constexpr double kMagic = 271828;
// Bound of digests, so that their sums are exact.
constexpr uint64_t kDigests = 1ull << 40;

// Hashed, so that sums over different members differ.
float InputOf(uint64_t rank, uint64_t life, uint64_t step, uint64_t tensor, uint64_t index) {
  uint64_t mixed = (rank + 1) * 0x9e3779b97f4a7c15 ^ (life + 1) * 0xbf58476d1ce4e5b9 ^
                   (step + 1) * 0x94d049bb133111eb ^ (tensor + 1) * 0xd6e8feb86659fd93;
  mixed = (mixed ^ (mixed >> 31)) * 0x2545f4914f6cdd1d;
  return static_cast<float>(((mixed >> 20) + index * 31 * (1 + (mixed >> 60))) % 200'003);
}

}  // namespace

// ------------------------------------------------------------------ within a replica

std::vector<double> Inside::Broadcast(int place, const std::vector<double>& values) {
  std::unique_lock<std::mutex> lock(mu_);
  if (place == 0) given_ = values;
  const uint64_t turn = turn_;
  if (++came_ == ranks_) {
    came_ = 0;
    ++turn_;
    values_ = given_;
    cond_.notify_all();
  }
  cond_.wait(lock, [&] { return broken_ || turn_ != turn; });
  if (turn_ == turn) throw core::Error("another rank of the replica has gone");
  return values_;
}

// ------------------------------------------------------------------ a member

ReplicaMember::ReplicaMember(const ReplicaPlan* plan, int rank, int life, core::Worker* worker,
                             Inside* inside, Witness* witness)
    : plan_(*plan),
      rank_(rank),
      life_(life),
      replica_(rank / plan->ranks),
      place_(rank % plan->ranks),
      worker_(worker),
      inside_(inside),
      witness_(witness) {}

ReplicaMember::~ReplicaMember() = default;

void ReplicaMember::BeginOptimizer() {
  if (plan_.parameters == 0) return;
  optimizer_ = std::make_unique<ReplicaOptimizer>(&plan_, rank_, worker_, witness_);
  if (worker_->IsLate()) return;
  if (replica_ == 0) optimizer_->Load();
  Values none = {0};
  Sum("loaded", &none);
  ++witness_->loaded;
}

void ReplicaMember::Run() {
  BeginOptimizer();
  int step = worker_->IsLate() ? Join() : 0;
  for (; step < plan_.steps; ++step) {
    Step(step);
    Control(step);
    // A member that dies with a server before all have made the step may have sums that no other
    // has.
    for (const auto& [sum, lacks] : seen_before_) {
      witness_->SawSum(step - 1, sum.first, place_, sum.second, lacks);
    }
    seen_before_.swap(seen_);
    seen_.clear();
  }
}

std::vector<uint32_t> ReplicaMember::Peers() const {
  std::vector<uint32_t> peers;
  for (int i = 0; i < plan_.replicas; ++i) peers.push_back(i * plan_.ranks + place_);
  return peers;
}

void ReplicaMember::Step(int step) {
  inside_->RestIfStuck();
  (void)worker_->TakeMissing();
  std::vector<int64_t> handles;
  std::vector<std::vector<float>*> tensors;
  witness_->Pushes(rank_, life_, step);
  for (size_t i = 0; i < plan_.counts.size(); ++i) {
    auto& values = memory_.emplace_back(plan_.counts[i]);
    for (size_t k = 0; k < values.size(); ++k) values[k] = InputOf(rank_, life_, step, i, k);
    core::PushPullRequest request;
    request.tensor.name = "t" + std::to_string(i);
    request.tensor.bytes = values.size() * sizeof(float);
    request.tensor.average = false;
    request.tensor.group = Peers();
    request.input = request.output = values.data();
    request.priority = static_cast<int>(Random(3));
    handles.push_back(worker_->PushPull(request));
    tensors.push_back(&values);
  }
  for (const int64_t handle : handles) {
    if (!worker_->WaitFor(handle, nullptr, std::chrono::seconds(1000))) {
      witness_->Wrong("an operation was waited for without end");
    }
  }
  if (optimizer_) optimizer_->Step(step, life_);
  uint32_t named = 0;
  for (const int rank : worker_->TakeMissing()) named |= 1u << (rank / plan_.ranks);
  uint32_t lacks = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    CheckSum(*tensors[i], step, static_cast<int>(i), named, &lacks);
    for (const float value : *tensors[i]) {
      state_ = (state_ * 31 + static_cast<uint64_t>(value)) % kDigests;
    }
  }
  if (optimizer_) {
    lacks |= optimizer_->Check(step, named, &seen_);
    state_ = (state_ * 31 + optimizer_->Digest()) % kDigests;
  }
  if (named != lacks) witness_->Wrong("answers name other ranks than those their sums lack");
}

void ReplicaMember::CheckSum(const std::vector<float>& values, int step, int tensor, uint32_t named,
                             uint32_t* lacks) {
  const size_t per_partition = kPartitionBytes / sizeof(float);
  for (size_t begin = 0; begin < values.size(); begin += per_partition) {
    const size_t end = std::min(begin + per_partition, values.size());
    bool found = false;
    for (uint32_t without = 0; without < (1u << plan_.replicas) && !found; ++without) {
      if ((without & ~named) != 0) continue;
      const int present = plan_.replicas - __builtin_popcount(without);
      bool holds = true;
      for (size_t k = begin; k < end && holds; ++k) {
        double sum = 0;
        for (int i = 0; i < plan_.replicas && holds; ++i) {
          if ((without >> i & 1) != 0) continue;
          const int rank = i * plan_.ranks + place_;
          const int life = witness_->LifeAt(rank, step);
          holds = life > 0;
          sum += InputOf(rank, life, step, tensor, k);
        }
        holds = holds && values[k] == static_cast<float>(sum * plan_.replicas / present);
      }
      if (!holds) continue;
      found = true;
      *lacks |= without;
      seen_[{tensor, begin / per_partition}] = without;
    }
    if (!found) {
      witness_->Wrong("a sum of step " + std::to_string(step) + " at worker " +
                      std::to_string(rank_) + " is that of no list of members");
    }
  }
}

void ReplicaMember::Sum(const std::string& name, Values* values, std::vector<uint32_t> group) {
  inside_->RestIfStuck();
  Values& memory = small_.emplace_back(*values);
  core::PushPullRequest request;
  request.tensor.name = name;
  request.tensor.dtype = core::DType::kFloat64;
  request.tensor.bytes = memory.size() * sizeof(double);
  request.tensor.average = false;
  request.tensor.group = group.empty() ? Peers() : std::move(group);
  request.input = request.output = memory.data();
  if (!worker_->WaitFor(worker_->PushPull(request), nullptr, std::chrono::seconds(1000))) {
    witness_->Wrong("'" + name + "' was waited for without end");
  }
  *values = memory;
}

void ReplicaMember::Control(int step) {
  const int count = plan_.replicas;
  Values chosen = {-1, 0};
  if (place_ == 0) {
    // A replica joins only if all members see the same start of it waiting. In that case the mean
    // of their views equals this member's view, and so does the mean of squares.
    const ps::ReplicaView view = worker_->Replicas();
    Values mine(2 * count), sum;
    for (int i = 0; i < view.count(); ++i) {
      if (view.waiting[i] == '1') mine[i] = view.ready_epochs[i];
      mine[count + i] = mine[i] * mine[i];
    }
    sum = mine;
    Sum("control", &sum);
    for (int i = 0; i < count && chosen[0] < 0; ++i) {
      const bool all = sum[i] == count * mine[i] && sum[count + i] == count * mine[count + i];
      if (all && mine[i] > 0) chosen = {static_cast<double>(i), mine[i]};
    }
  }
  chosen = inside_->Broadcast(place_, chosen);
  if (chosen[0] >= 0) Admit(step, static_cast<int>(chosen[0]), static_cast<int>(chosen[1]));
}

template <typename Condition>
ps::ReplicaView ReplicaMember::Await(Condition condition) {
  while (true) {
    const ps::ReplicaView view = worker_->Replicas();
    if (view.count() > 0 && condition(view)) return view;
    worker_->Check();
    std::this_thread::sleep_for(std::chrono::microseconds(500 + Random(500)));
  }
}

void ReplicaMember::Admit(int step, int replica, int life) {
  inside_->Broadcast(place_, {});  // its ranks are between two steps
  Values none = {0};
  if (place_ == 0) Sum("rest", &none);
  inside_->Broadcast(place_, {});  // and so are the ranks of all replicas
  if (place_ == 0) worker_->AskToAdmit(replica, life);
  const auto is_decided = [=](const ps::ReplicaView& view) {
    return view.epoch >= life &&
           (view.ready_epochs[replica] != life || view.waiting[replica] == '0');
  };
  const ps::ReplicaView view = Await(is_decided);
  const bool joined = view.IsPresent(replica) && view.ready_epochs[replica] == life;
  if (joined && view.donors[replica] == replica_) Send(step, replica, life);
  CompareStates();
}

void ReplicaMember::Send(int step, int joiner, int life) {
  const auto other = static_cast<uint32_t>(joiner * plan_.ranks + place_);
  if (optimizer_) {
    optimizer_->Settle();
    witness_->optimizers[rank_] = optimizer_->State();
  }
  witness_->rounds[rank_] = worker_->Rounds();
  Values values = {kMagic, static_cast<double>(step + 1), static_cast<double>(state_)};
  std::vector<uint32_t> group = {static_cast<uint32_t>(rank_), other};
  std::sort(group.begin(), group.end());
  Sum("join " + std::to_string(life), &values, group);
}

int ReplicaMember::Join() {
  worker_->SayReady();
  const ps::ReplicaView view =
      Await([this](const ps::ReplicaView& seen) { return seen.IsPresent(replica_); });
  const int donor = view.donors[replica_] * plan_.ranks + place_;
  if (donor < 0) throw core::Error("no replica is there to join");
  std::vector<uint32_t> group = {static_cast<uint32_t>(rank_), static_cast<uint32_t>(donor)};
  std::sort(group.begin(), group.end());
  Values values = {0, 0, 0};
  Sum("join " + std::to_string(view.ready_epochs[replica_]), &values, group);
  if (values[0] != kMagic) throw core::Error("the donor has gone");
  state_ = static_cast<uint64_t>(values[2]);
  worker_->SetRounds(witness_->rounds[donor]);
  if (optimizer_) optimizer_->Join(witness_->optimizers[donor]);
  CompareStates();
  ++witness_->joins;
  return static_cast<int>(values[1]);
}

void ReplicaMember::CompareStates() {
  Values values = {static_cast<double>(state_), static_cast<double>(state_ % 1000003)};
  const Values mine = values;
  Sum("compare", &values);
  for (size_t i = 0; i < mine.size(); ++i) {
    if (values[i] == plan_.replicas * mine[i]) continue;
    witness_->Wrong("replicas have different states when one joins");
  }
}

namespace {

// ----- parameters that servers keep for replicas

constexpr double kClipped = 0.25;

// Returns the kind of a step. 0: at once; 1: the norm first; 2 to 4: speculative, then kept,
// clipped or dropped.
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
  core::RankGroup::Ranks peers;
  for (int i = 0; i < plan_.replicas; ++i) peers.push_back(i * plan_.ranks + rank_ % plan_.ranks);
  whole_.group = std::move(peers);
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
  // The next push sends the verdict again.
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
