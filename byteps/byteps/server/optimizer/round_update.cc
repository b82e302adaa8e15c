#include "byteps/server/optimizer/round_update.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/base/wire.h"

namespace byteps {
namespace core {
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
  // PUSH_STEP tells the backup the step together with the gradients.
  is_told_ = op_ == kPushStep;
  if (op_ == kPushStep) return MakeStep(sum);
  SumSquares(*sum);
  if (op_ == kPushTry) {
    parameters_ = std::move(spare);
    const std::string error = Preview(*sum);
    if (!error.empty()) return error;
    tried_ = step_;
    counters_->tried_partitions.Add();
  }
  step_of_ = -1;  // the members decide next
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
  // Differences are shorter than the gradients, so they get memory of their own.
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
  in.Get<uint32_t>();  // skips the round, which RoundOf reads
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
  restored_ = true;
  if (pushed_by_ != kPushTry) return "";
  if (!has_answer()) return Preview(sum);
  // A member that has not received the preview decides like the other members. If the step was
  // kept, the sum is the preview. Otherwise the member sends another request before it uses
  // parameters.
  parameters_ = sum;
  return "";
}

}  // namespace core
}  // namespace byteps
