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
#include "byteps/server/optimizer/update.h"

namespace byteps {
namespace core {

namespace {

// Number of values that are updated and encoded together: whole blocks that fit into a core's
// cache.
constexpr size_t kChunk = 64 * kBlockValues;

// Address of the block that begins with `value`.
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
  float chunk[kChunk];  // a chunk is aligned; `values` may not be
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
    const size_t chunk_elements = std::min(kChunk, count - begin);
    WidenParameters(rule_.held, Held(first + begin), chunk, chunk_elements);
    memcpy(values + begin * sizeof(float), chunk, chunk_elements * sizeof(float));
  }
}

std::string PartitionState::Read(uint32_t slot, size_t offset, size_t bytes, char* values) const {
  if (!state_) return NotLoaded();
  if (bytes == 0) return "";  // `values` may be null if bytes is 0
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
    // Uncounted values are multiplied by 0, not skipped, because 0 times an infinity or NaN is NaN.
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

}  // namespace core
}  // namespace byteps
