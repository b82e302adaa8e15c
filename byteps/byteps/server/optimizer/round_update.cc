#include "byteps/server/optimizer/round_update.h"

#include <cstring>

#include "byteps/base/invariant.h"
#include "byteps/base/probe.h"

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
  if (op_ == kPushStep) return MakeStep(sum);
  const GradientSums sums = state_->SumsOf(sum->data());
  sums_ = SharedBytes::New(sizeof(sums));
  memcpy(sums_.data(), &sums, sizeof(sums));
  if (op_ == kPushTry) {
    UpdateStep step;
    UpdateStep::Unpack(step_, &step);
    parameters_ = std::move(spare);
    if (parameters_.size() != state_->answer_bytes()) {
      PS_PROBE(kNoSpareMemory);
      parameters_ = SharedBytes::New(state_->answer_bytes());
    }
    const std::string error = state_->Preview(step, sum->data(), parameters_.data());
    if (!error.empty()) return error;
    tried_ = step_;
    counters_->tried_partitions.Add();
  }
  step_of_ = -1;  // who is told of these says what to do then
  return "";
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

}  // namespace core
}  // namespace byteps
