#include "byteps/server/optimizer/partition_state.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "byteps/base/out_of_memory.h"

namespace byteps {
namespace core {

PartitionState::PartitionState(const Declaration* declaration, uint64_t index)
    : declaration_(declaration),
      rule_(*declaration->rule),
      size_(declaration->PartitionSize(index) / SizeOf(declaration->dtype)) {
  const uint64_t first = index * declaration->partition_bytes / SizeOf(declaration->dtype);
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
  return state_ ? "" : "the parameters of '" + declaration_->name + "' were never loaded";
}

std::string PartitionState::Load(uint32_t slot, const char* values) {
  const size_t slots = rule_.NumSlots();
  if (slot > 0 && !state_) return NotLoaded();
  if (!state_) {
    state_.reset(new (std::nothrow) float[slots * size_]);
    if (!state_) throw OutOfMemory(slots * size_ * sizeof(float));
  }
  memcpy(Slot(slot), values, size_ * sizeof(float));
  if (slot == 0) {
    std::fill(Slot(0) + size_, Slot(0) + slots * size_, 0.0f);
    has_momentum_ = false;
  } else {
    has_momentum_ = true;
  }
  return "";
}

std::string PartitionState::Read(uint32_t slot, size_t offset, size_t bytes, char* values) const {
  if (!state_) return NotLoaded();
  // For nothing there may be no place.
  if (bytes > 0) memcpy(values, reinterpret_cast<const char*>(Slot(slot)) + offset, bytes);
  return "";
}

GradientSums PartitionState::SumsOf(const char* gradients) const {
  const DType t = declaration_->dtype;
  GradientSums sums;
  for (const Run& run : runs_) {
    const char* const at = gradients + run.begin * SizeOf(t);
    const size_t n = run.end - run.begin;
    // 0 times what is no finite number is none either.
    sums.squares += (run.counted ? 1.0 : 0.0) * SumOfSquares(t, at, n);
    if (rule_.counts_zeros && run.counted) sums.zeros += static_cast<double>(CountZeros(t, at, n));
  }
  return sums;
}

std::string PartitionState::ReadParameters(char* values) const {
  if (!state_) return NotLoaded();
  RoundParameters(declaration_->dtype, values, Slot(0), size_);
  return "";
}

template <typename OfAdamW, typename OfSgd>
void PartitionState::ForEachRun(const UpdateStep& step, OfAdamW adamw, OfSgd sgd) const {
  const float scale = static_cast<float>(step.grad_scale);
  for (const Run& run : runs_) {
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

std::string PartitionState::Update(const UpdateStep& step, char* values) {
  if (!state_) return NotLoaded();
  const DType t = declaration_->dtype;
  const auto at = [&](const Run& run) { return values + run.begin * SizeOf(t); };
  ForEachRun(
      step,
      [&](const Run& run, size_t n, const AdamWStep& numbers) {
        UpdateAdamW(t, numbers, at(run), Slot(0) + run.begin, Slot(1) + run.begin,
                    Slot(2) + run.begin, n);
      },
      [&](const Run& run, size_t n, const SgdStep& numbers) {
        UpdateSgd(t, numbers, at(run), Slot(0) + run.begin, Momentum(run), n);
      });
  has_momentum_ = true;
  return "";
}

std::string PartitionState::Preview(const UpdateStep& step, const char* gradients,
                                    char* parameters) const {
  if (!state_) return NotLoaded();
  const DType t = declaration_->dtype;
  const auto from = [&](const Run& run) { return gradients + run.begin * SizeOf(t); };
  const auto to = [&](const Run& run) { return parameters + run.begin * SizeOf(t); };
  ForEachRun(
      step,
      [&](const Run& run, size_t n, const AdamWStep& numbers) {
        PreviewAdamW(t, numbers, from(run), to(run), Slot(0) + run.begin, Slot(1) + run.begin,
                     Slot(2) + run.begin, n);
      },
      [&](const Run& run, size_t n, const SgdStep& numbers) {
        PreviewSgd(t, numbers, from(run), to(run), Slot(0) + run.begin, Momentum(run), n);
      });
  return "";
}

}  // namespace core
}  // namespace byteps
