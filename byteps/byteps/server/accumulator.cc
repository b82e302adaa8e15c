#include "byteps/server/accumulator.h"

#include <string>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/server/reducer.h"

namespace byteps {
namespace core {

void Accumulator::Take(const Declaration& declaration, const AdditionRule& rule, size_t member,
                       SharedBytes values, Scratch* scratch) {
  if (!rule.in_order) return Add(declaration, rule, std::move(values), scratch);
  waiting_.resize(declaration.group.size());
  waiting_[member] = std::move(values);
  while (added_ < waiting_.size() && !waiting_[added_].empty()) {
    Add(declaration, rule, std::move(waiting_[added_]), scratch);
  }
}

void Accumulator::Add(const Declaration& declaration, const AdditionRule& rule, SharedBytes values,
                      Scratch* scratch) {
  const DType t = declaration.dtype;
  const size_t n = values.size() / SizeOf(t);
  const size_t members = declaration.group.size();
  const size_t added = ++added_;
  const bool last = added == members;
  const bool wide = IsHalf(t) || (t == DType::kFloat32 && rule.wide_float32);
  BPS_INVARIANT("a member's push is added once", added <= members,
                std::to_string(added) + " pushes of " + std::to_string(members) + " members of '" +
                    declaration.name + "'");
  const int divisor = declaration.average && last ? static_cast<int>(members) : 1;
  if (IsBlock(t) && declaration.rule) {
    AddGradients(t, last ? divisor : 0, std::move(values));
  } else if (members == 1 || (added == 1 && !IsBlock(t))) {
    sum_ = std::move(values);
  } else if (IsBlock(t)) {
    AddBlocks(t, last ? divisor : 0, rule, std::move(values), scratch);
  } else if (members == 2 || !wide) {
    core::Add(t, sum_.data(), values.data(), divisor, n);
    if (last && rule.keeps_memory) spare_ = std::move(values);
  } else if (!last) {
    if (added == 2) {
      wide_ = scratch->Take(n * SizeOf(AccumulatorOf(t)));
      WideBegin(t, wide_.data(), sum_.data(), values.data(), n);
      sum_ = SharedBytes();
    } else {
      WideAdd(t, wide_.data(), values.data(), n);
    }
    if (added + 1 == members && rule.keeps_memory) spare_ = std::move(values);
  } else {
    WideEnd(t, values.data(), wide_.data(), divisor, n);
    sum_ = std::move(values);
    scratch->Return(std::move(wide_));
  }
}

BlockSum Accumulator::Waiting(DType t, const void** in, float* wide, bool begun) const {
  for (size_t i = 0; i < blocks_.size(); ++i) in[i] = blocks_[i].data();
  return {t, in, blocks_.size(), blocks_.back().size() / SizeOf(t), wide, begun};
}

void Accumulator::AddBlocks(DType t, int divisor, const AdditionRule& rule, SharedBytes values,
                            Scratch* scratch) {
  const bool last = divisor > 0;
  blocks_.push_back(std::move(values));
  if (!last && blocks_.size() < kAtOnce) return;
  const bool begun = wide_.size() > 0;
  if (!last && !begun) {
    wide_ = scratch->Take(ValuesIn(t, blocks_.back().size()) * sizeof(float));
  }
  const void* in[kAtOnce];
  const BlockSum sum = Waiting(t, in, reinterpret_cast<float*>(wide_.data()), begun);
  if (last) {
    sum_ = std::move(blocks_.back());
    EndBlocks(sum, divisor, sum_.data(), rule.lost, rule.chance);
    scratch->Return(std::move(wide_));
  } else {
    core::AddBlocks(sum);
  }
  blocks_.clear();
}

void Accumulator::AddGradients(DType t, int divisor, SharedBytes values) {
  const bool last = divisor > 0;
  blocks_.push_back(std::move(values));
  if (!last && blocks_.size() < kAtOnce) return;
  const bool begun = !sum_.empty();
  if (!begun) sum_ = SharedBytes::New(ValuesIn(t, blocks_.back().size()) * sizeof(float));
  const void* in[kAtOnce];
  core::AddBlocks(Waiting(t, in, reinterpret_cast<float*>(sum_.data()), begun), last ? divisor : 1);
  blocks_.clear();
}

void Accumulator::Clear(Scratch* scratch) {
  waiting_.clear();
  blocks_.clear();
  scratch->Return(std::move(wide_));
  sum_ = spare_ = SharedBytes();
}

}  // namespace core
}  // namespace byteps
