#include "byteps/server/optimizer/partition_state.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "byteps/base/block_codec.h"
#include "byteps/base/invariant.h"
#include "byteps/base/memory_reserve.h"
#include "byteps/base/protocol.h"
#include "byteps/base/wire.h"

namespace byteps {
namespace core {

namespace {

// Values that are updated and encoded at a time, so that they stay in a core's cache: whole blocks.
constexpr size_t kChunk = 64 * kBlockValues;

// Where the block of a value, the first one of it, begins.
char* DifferencesAt(char* blocks, size_t value) {
  return blocks + value / kBlockValues * SizeOf(DType::kInt8x128);
}

}  // namespace

PartitionState::PartitionState(const Declaration* declaration, uint64_t index)
    : declaration_(declaration),
      rule_(*declaration->rule),
      has_blocks_(IsBlock(declaration->dtype)),
      type_(has_blocks_ ? DType::kFloat32 : declaration->dtype),
      size_(declaration->PartitionValues(index)),
      answer_bytes_(AnswerBytes(declaration->dtype, declaration->PartitionSize(index))) {
  const uint64_t first = ValuesIn(declaration->dtype, index * declaration->partition_bytes);
  uint64_t begin = 0;
  for (const auto& segment : rule_.segments) {
    const uint64_t from = std::max(begin, first);
    const uint64_t to = std::min(segment.end, first + size_);
    if (from < to) {
      runs_.push_back({from - first, to - first, segment.group, segment.counted});
    }
    begin = segment.end;
  }
}

std::string PartitionState::NotLoaded() const {
  return state_ ? ""
                : "the parameters of '" + declaration_->name +
                      "' were never loaded, or are lost with their server";
}

std::string PartitionState::Load(uint32_t slot, const char* values) {
  const size_t slots = rule_.NumSlots();
  if (slot > 0 && !state_) return NotLoaded();
  if (!state_) {
    const size_t held_bytes = has_blocks_ ? size_ * SizeOf(rule_.held) : 0;
    std::unique_ptr<float[]> state(new (std::nothrow) float[slots * size_]);
    if (held_bytes > 0) held_.reset(new (std::nothrow) char[held_bytes]);
    if (!state || (held_bytes > 0 && !held_)) {
      throw OutOfMemory(slots * size_ * sizeof(float) + held_bytes);
    }
    state_ = std::move(state);
  }
  if (slot == slots) {
    LoadHeld(values);
    return "";
  }
  memcpy(Slot(slot), values, size_ * sizeof(float));
  if (slot == 0) {
    std::fill(Slot(0) + size_, Slot(0) + slots * size_, 0.0f);
    if (held_) LoadHeld(values);
    has_momentum_ = false;
  } else {
    has_momentum_ = true;
  }
  return "";
}

void PartitionState::LoadHeld(const char* values) {
  float chunk[kChunk];  // aligned, as `values` may not be
  for (size_t begin = 0; begin < size_; begin += kChunk) {
    const size_t count = std::min(kChunk, size_ - begin);
    memcpy(chunk, values + begin * sizeof(float), count * sizeof(float));
    RoundParameters(rule_.held, Held(begin), chunk, count);
  }
}

void PartitionState::ReadHeld(size_t offset, size_t bytes, char* values) const {
  float chunk[kChunk];
  const size_t first = offset / sizeof(float), count = bytes / sizeof(float);
  for (size_t begin = 0; begin < count; begin += kChunk) {
    const size_t some = std::min(kChunk, count - begin);
    WidenParameters(rule_.held, Held(first + begin), chunk, some);
    memcpy(values + begin * sizeof(float), chunk, some * sizeof(float));
  }
}

std::string PartitionState::Read(uint32_t slot, size_t offset, size_t bytes, char* values) const {
  if (!state_) return NotLoaded();
  if (bytes == 0) return "";  // there may be no place for nothing
  if (slot == rule_.NumSlots()) {
    ReadHeld(offset, bytes, values);
  } else {
    memcpy(values, reinterpret_cast<const char*>(Slot(slot)) + offset, bytes);
  }
  return "";
}

GradientSums PartitionState::SumsOf(const char* gradients) const {
  GradientSums sums;
  for (const Run& run : runs_) {
    const char* const at = gradients + run.begin * SizeOf(type_);
    const size_t n = run.end - run.begin;
    // 0 times what is no finite number is none either.
    sums.squares += (run.counted ? 1.0 : 0.0) * SumOfSquares(type_, at, n);
    if (rule_.counts_zeros && run.counted)
      sums.zeros += static_cast<double>(CountZeros(type_, at, n));
  }
  return sums;
}

std::string PartitionState::Stay(char* answer) const {
  if (!state_) return NotLoaded();
  if (has_blocks_) {
    memset(answer, 0, answer_bytes_);
  } else {
    RoundParameters(type_, answer, Slot(0), size_);
  }
  return "";
}

template <typename OfAdamW, typename OfSgd>
void PartitionState::ForEachRun(const UpdateStep& step, size_t begin, size_t end, OfAdamW adamw,
                                OfSgd sgd) const {
  const float scale = static_cast<float>(step.grad_scale);
  for (const Run& whole : runs_) {
    if (whole.end <= begin || whole.begin >= end) continue;
    const Run run = {std::max(whole.begin, begin), std::min(whole.end, end), whole.group,
                     whole.counted};
    const UpdateRule::Group& group = rule_.groups[run.group];
    const UpdateStep::Rate& rate = step.rates[run.group];
    const size_t n = run.end - run.begin;
    if (rule_.algorithm == UpdateRule::kAdamW) {
      adamw(run, n,
            AdamWStep{rate.learning_rate, rate.weight_decay, group.beta1, group.beta2, group.eps,
                      step.number, scale});
    } else {
      sgd(run, n,
          SgdStep{rate.learning_rate, rate.weight_decay, group.beta1, group.beta2, group.nesterov,
                  !has_momentum_, scale});
    }
  }
}

float* PartitionState::Momentum(const Run& run) const {
  return rule_.NumSlots() > 1 ? Slot(1) + run.begin : nullptr;
}

void PartitionState::UpdateSome(const UpdateStep& step, size_t begin, size_t end, char* gradients) {
  const auto at = [&](const Run& run) { return gradients + (run.begin - begin) * SizeOf(type_); };
  ForEachRun(
      step, begin, end,
      [&](const Run& run, size_t n, const AdamWStep& numbers) {
        UpdateAdamW(type_, numbers, at(run), Slot(0) + run.begin, Slot(1) + run.begin,
                    Slot(2) + run.begin, n);
      },
      [&](const Run& run, size_t n, const SgdStep& numbers) {
        UpdateSgd(type_, numbers, at(run), Slot(0) + run.begin, Momentum(run), n);
      });
}

void PartitionState::PreviewSome(const UpdateStep& step, size_t begin, size_t end,
                                 const char* gradients, char* parameters) const {
  const auto from = [&](const Run& run) { return gradients + (run.begin - begin) * SizeOf(type_); };
  const auto to = [&](const Run& run) { return parameters + (run.begin - begin) * SizeOf(type_); };
  ForEachRun(
      step, begin, end,
      [&](const Run& run, size_t n, const AdamWStep& numbers) {
        PreviewAdamW(type_, numbers, from(run), to(run), Slot(0) + run.begin, Slot(1) + run.begin,
                     Slot(2) + run.begin, n);
      },
      [&](const Run& run, size_t n, const SgdStep& numbers) {
        PreviewSgd(type_, numbers, from(run), to(run), Slot(0) + run.begin, Momentum(run), n);
      });
}

std::string PartitionState::Update(const UpdateStep& step, char* gradients, char* answer) {
  if (!state_) return NotLoaded();
  if (!has_blocks_) {
    UpdateSome(step, 0, size_, gradients);
    if (answer != gradients) memcpy(answer, gradients, answer_bytes_);
  } else {
    for (size_t begin = 0; begin < size_; begin += kChunk) {
      const size_t end = std::min(size_, begin + kChunk);
      UpdateSome(step, begin, end, gradients + begin * sizeof(float));
      EncodeDifferences(rule_.held, Slot(0) + begin, Held(begin), end - begin,
                        DifferencesAt(answer, begin), Held(begin));
    }
  }
  has_momentum_ = true;
  return "";
}

std::string PartitionState::Preview(const UpdateStep& step, const char* gradients,
                                    char* answer) const {
  if (!state_) return NotLoaded();
  if (!has_blocks_) {
    PreviewSome(step, 0, size_, gradients, answer);
    return "";
  }
  float parameters[kChunk];
  for (size_t begin = 0; begin < size_; begin += kChunk) {
    const size_t end = std::min(size_, begin + kChunk);
    PreviewSome(step, begin, end, gradients + begin * sizeof(float),
                reinterpret_cast<char*>(parameters));
    EncodeDifferences(rule_.held, parameters, Held(begin), end - begin,
                      DifferencesAt(answer, begin), nullptr);
  }
  return "";
}

uint64_t StateBytes(const Declaration& declaration, int rank, int num_servers) {
  if (!declaration.rule) return 0;
  uint64_t values = 0;
  for (uint64_t i = 0; i < declaration.NumPartitions(); ++i) {
    const int server =
        ServerOf(declaration.hash, declaration.Key(), declaration.placement, i, num_servers);
    if (server == rank) values += declaration.PartitionValues(i);
  }
  const UpdateRule& rule = *declaration.rule;
  const bool has_blocks = IsBlock(declaration.dtype);
  const uint64_t held = has_blocks ? SizeOf(rule.held) : 0;
  const uint64_t gradient = has_blocks ? sizeof(float) : SizeOf(declaration.dtype);
  return values * (sizeof(float) * rule.NumSlots() + held + (rule.speculative ? gradient : 0));
}

StateMemory::StateMemory(const Config& config)
    : is_set_(config.Int("BYTEPS_SERVER_STATE_BYTES") > 0),
      limit_(is_set_ ? config.Int("BYTEPS_SERVER_STATE_BYTES") : AvailableMemory()),
      num_servers_(static_cast<int>(config.Int("DMLC_NUM_SERVER"))) {}

uint64_t StateMemory::BytesOf(const Declaration& declaration, int rank, bool copies) const {
  uint64_t bytes = StateBytes(declaration, rank, num_servers_);
  if (copies)
    bytes += StateBytes(declaration, (rank + num_servers_ - 1) % num_servers_, num_servers_);
  return bytes;
}

void StateMemory::Return(const Declaration& declaration, int rank, bool copies) {
  promised_ -= BytesOf(declaration, rank, copies);
}

std::string StateMemory::Promise(const Declaration& declaration, int rank, bool copies) {
  const uint64_t wanted = BytesOf(declaration, rank, copies);
  if (wanted > limit_ || promised_ > limit_ - wanted) {
    return "server " + std::to_string(rank) +
           " has too little memory for the optimizer state of '" + declaration.name +
           "': it needs " + std::to_string(wanted) + " bytes (" + declaration.rule->Describe() +
           (copies ? ", and a copy of another server's state" : "") + "), has promised " +
           std::to_string(promised_) + " to other tensors, and may keep " + std::to_string(limit_) +
           (is_set_ ? " (BYTEPS_SERVER_STATE_BYTES)" : " (what was free when it started)") +
           ": take more servers, or servers with more memory";
  }
  promised_ += wanted;
  return "";
}

namespace {

std::string Describe(int op, const std::string& step) {
  UpdateStep read;
  if (step.empty()) return "the norm of the gradients first";
  if (!UpdateStep::Unpack(step, &read)) return "";
  return read.Describe() + (op == kPushTry ? ", to be tried" : "");
}

}  // namespace

std::string RoundUpdate::Agree(int rank, int op, const std::string& step) {
  if (step_of_ < 0) {
    step_ = step;
    step_of_ = rank;
    op_ = op;
  }
  if (step_ == step && op_ == op) return "";
  return "workers disagree on a step of '" + declaration_->name + "': worker " +
         std::to_string(step_of_) + " asks for " + Describe(op_, step_) + ", worker " +
         std::to_string(rank) + " for " + Describe(op, step);
}

std::string RoundUpdate::Complete(SharedBytes* sum, SharedBytes spare) {
  pushed_by_ = op_;
  pushed_step_ = step_;
  is_told_ = op_ == kPushStep;  // with the gradients, where there is a backup
  if (op_ == kPushStep) return MakeStep(sum);
  SumSquares(*sum);
  if (op_ == kPushTry) {
    parameters_ = std::move(spare);
    const std::string error = Preview(*sum);
    if (!error.empty()) return error;
    tried_ = step_;
    counters_->tried_partitions.Add();
  }
  step_of_ = -1;  // who is told of these says what to do then
  return "";
}

std::string RoundUpdate::CompleteCopy(SharedBytes* sum) {
  pushed_by_ = op_;
  pushed_step_ = step_;
  if (op_ == kPushStep) return MakeStep(sum);
  SumSquares(*sum);
  if (op_ == kPushTry) tried_ = step_;
  step_of_ = -1;
  return "";
}

void RoundUpdate::SumSquares(const SharedBytes& gradients) {
  const GradientSums sums = state_->SumsOf(gradients.data());
  sums_ = SharedBytes::New(sizeof(sums));
  memcpy(sums_.data(), &sums, sizeof(sums));
}

std::string RoundUpdate::Preview(const SharedBytes& gradients) {
  UpdateStep step;
  UpdateStep::Unpack(pushed_step_, &step);
  if (parameters_.size() != state_->answer_bytes()) {
    PS_PROBE(kNoSpareMemory);
    parameters_ = SharedBytes::New(state_->answer_bytes());
  }
  return state_->Preview(step, gradients.data(), parameters_.data());
}

std::string RoundUpdate::MakeStep(SharedBytes* sum) {
  UpdateStep step;
  UpdateStep::Unpack(step_, &step);
  BPS_INVARIANT("a step is kept or dropped, once", !updated_,
                "round " + std::to_string(round_) + " of '" + declaration_->name + "'");
  updated_ = true;
  const bool was_tried = !tried_.empty();
  if (was_tried) step.skip ? PS_PROBE(kStepDropped) : PS_PROBE(kStepMade);
  // Differences are shorter than the gradients that they answer.
  const bool in_place = sum->size() == state_->answer_bytes();
  const SharedBytes gradients = *sum;
  if (!in_place) *sum = SharedBytes::New(state_->answer_bytes());
  if (step.skip) return state_->Stay(sum->data());
  if (was_tried && step_ != tried_) {
    PS_PROBE(kStepRedone);
    counters_->redone_partitions.Add();
  }
  counters_->updated_partitions.Add();
  return state_->Update(step, gradients.data(), sum->data());
}

std::string RoundUpdate::Decide(int rank, const std::string& step, SharedBytes* sum,
                                std::string* failure) {
  const std::string error = Agree(rank, kStep, step);
  if (error.empty() && !updated_) *failure = MakeStep(sum);
  return error.empty() ? *failure : error;
}

void RoundUpdate::Overtake(SharedBytes* sum) {
  if (tried_.empty() || overtaken_) return;
  if (sum != nullptr && !updated_) {
    if (parameters_.empty()) Preview(*sum);
    *sum = parameters_;
  }
  overtaken_ = true;
}

bool RoundUpdate::IsLike(int op, const std::string& step) const {
  return op == pushed_by_ && step == pushed_step_;
}

// ------------------------------------------------------------------ copies

std::string RoundUpdate::Pack() const {
  WireWriter out;
  out.Put(round_);
  out.Put(static_cast<uint8_t>(pushed_by_));
  out.PutText(pushed_step_);
  out.Put<uint8_t>(updated_ ? 1 : 0);
  out.PutText(updated_ ? step_ : "");
  out.Put(static_cast<uint32_t>(std::max(step_of_, 0)));
  out.Put<uint8_t>(overtaken_ ? 1 : 0);
  out.PutText(std::string(sums_.data(), sums_.size()));
  return out.Take();
}

bool RoundUpdate::Unpack(const std::string& text) {
  WireReader in(text);
  in.Get<uint32_t>();  // see RoundOf
  pushed_by_ = op_ = in.Get<uint8_t>();
  pushed_step_ = step_ = in.GetText();
  updated_ = in.Get<uint8_t>() != 0;
  const std::string made = in.GetText();
  const auto made_by = static_cast<int>(in.Get<uint32_t>());
  overtaken_ = in.Get<uint8_t>() != 0;
  const std::string sums = in.GetText();
  if (!in.ok() || !in.at_end()) return false;
  const bool at_once = pushed_by_ == kPushStep;
  if (!at_once && pushed_by_ != kPushTry && pushed_by_ != kPushNorm) return false;
  if (sums.size() != (at_once ? 0 : sizeof(GradientSums)) || (at_once && !updated_)) return false;
  const auto fits = [this](const std::string& packed) {
    UpdateStep step;
    return UpdateStep::Unpack(packed, &step) &&
           step.rates.size() == declaration_->rule->groups.size();
  };
  if (pushed_by_ != kPushNorm ? !fits(pushed_step_) : !pushed_step_.empty()) return false;
  if (updated_ && !fits(made)) return false;
  if (pushed_by_ == kPushTry) tried_ = pushed_step_;
  if (overtaken_ && tried_.empty()) return false;
  if (!at_once) {
    sums_ = SharedBytes::New(sums.size());
    memcpy(sums_.data(), sums.data(), sums.size());
  }
  if (updated_) {
    step_ = made;
    op_ = at_once ? kPushStep : kStep;
    step_of_ = made_by;
  }
  is_told_ = updated_;
  return true;
}

std::string RoundUpdate::Restore(const SharedBytes& sum) {
  if (pushed_by_ != kPushTry) return "";
  if (!has_answer()) return Preview(sum);
  // Who has not got the preview says the same of the step as the others.  If it was kept, these are
  // what it would have got; else it takes no parameters before it has asked for more.
  parameters_ = sum;
  return "";
}

}  // namespace core
}  // namespace byteps
