#include "byteps/server/accumulator.h"

#include <cstring>
#include <string>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/server/reducer.h"
#include "byteps/server/scratch.h"

namespace byteps {
namespace core {
namespace {

SharedBytes Zeros(size_t bytes) {
  SharedBytes zeros = SharedBytes::New(bytes);
  memset(zeros.data(), 0, bytes);
  return zeros;
}

}  // namespace

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
  bytes_ = values.size();
  const bool wide = IsHalf(t) || (t == DType::kFloat32 && rule.wide_float32) ||
                    (IsInteger(t) && declaration.average);
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
      wide_ = scratch->Take(n * AccumulatorSize(t));
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

void Accumulator::AddBlocks(DType t, float divisor, const AdditionRule& rule, SharedBytes values,
                            Scratch* scratch) {
  const bool last = divisor > 0;
  blocks_.push_back(std::move(values));
  if (last) return EndBlocks(t, divisor, rule, scratch);
  if (blocks_.size() < kAtOnce) return;
  const bool begun = wide_.size() > 0;
  if (!begun) wide_ = scratch->Take(ValuesIn(t, blocks_.back().size()) * sizeof(float));
  const void* in[kAtOnce];
  core::AddBlocks(Waiting(t, in, reinterpret_cast<float*>(wide_.data()), begun));
  blocks_.clear();
}

void Accumulator::EndBlocks(DType t, float divisor, const AdditionRule& rule, Scratch* scratch) {
  const void* in[kAtOnce];
  const BlockSum sum = Waiting(t, in, reinterpret_cast<float*>(wide_.data()), wide_.size() > 0);
  sum_ = std::move(blocks_.back());
  core::EndBlocks(sum, divisor, sum_.data(), rule.lost, rule.chance);
  scratch->Return(std::move(wide_));
  blocks_.clear();
}

void Accumulator::AddGradients(DType t, int divisor, SharedBytes values) {
  const bool last = divisor > 0;
  blocks_.push_back(std::move(values));
  if (last || blocks_.size() == kAtOnce) FlushGradients(t, last ? divisor : 1);
}

void Accumulator::FlushGradients(DType t, int divisor) {
  const bool begun = !sum_.empty();
  if (!begun) sum_ = SharedBytes::New(ValuesIn(t, blocks_.back().size()) * sizeof(float));
  const void* in[kAtOnce];
  core::AddBlocks(Waiting(t, in, reinterpret_cast<float*>(sum_.data()), begun),
                  static_cast<float>(divisor));
  blocks_.clear();
}

void Accumulator::Close(const Declaration& declaration, const AdditionRule& rule,
                        Scratch* scratch) {
  const DType t = declaration.dtype;
  for (SharedBytes& values : waiting_) {  // these pushes come after a missing one
    if (!values.empty()) Add(declaration, rule, std::move(values), scratch);
  }
  const auto members = static_cast<int>(declaration.group.size());
  const int times = declaration.average ? 1 : members;
  const int by = static_cast<int>(added_);
  if (IsBlock(t) && declaration.rule) {
    if (!blocks_.empty()) FlushGradients(t, 1);
    const size_t n = sum_.size() / sizeof(float);
    return Scale(DType::kFloat32, sum_.data(), nullptr, times, by, n);
  }
  if (IsBlock(t)) {
    // The blocks were added and freed already, so a new block must hold the sum.
    if (blocks_.empty()) blocks_.push_back(Zeros(bytes_));
    return EndBlocks(t, static_cast<float>(by) / static_cast<float>(times), rule, scratch);
  }
  if (wide_.size() == 0) {
    return Scale(t, sum_.data(), nullptr, times, by, sum_.size() / SizeOf(t));
  }
  sum_ = SharedBytes::New(bytes_);
  Scale(t, sum_.data(), wide_.data(), times, by, bytes_ / SizeOf(t));
  scratch->Return(std::move(wide_));
}

void Accumulator::Put(SharedBytes sum, Scratch* scratch) {
  Clear(scratch);
  sum_ = std::move(sum);
}

void Accumulator::Clear(Scratch* scratch) {
  waiting_.clear();
  blocks_.clear();
  scratch->Return(std::move(wide_));
  sum_ = spare_ = SharedBytes();
}

}  // namespace core
}  // namespace byteps
