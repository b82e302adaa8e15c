#include "byteps/base/update_rule.h"

#include <cmath>
#include <cstdio>
#include <cstring>

#include "byteps/base/wire.h"

namespace byteps {
namespace core {
namespace {

constexpr size_t kGroupBytes = 3 * 8 + 1;
constexpr size_t kSegmentBytes = 8 + 4 + 1;
constexpr size_t kRateBytes = 2 * 8;

void PutDouble(WireWriter* out, double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof(bits));
  out->Put(bits);
}

double GetDouble(WireReader* in) {
  const uint64_t bits = in->Get<uint64_t>();
  double value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

std::string Number(double value) {
  char text[32];
  snprintf(text, sizeof(text), "%.9g", value);
  return text;
}

bool IsUsable(const UpdateRule& rule, const UpdateRule::Group& group) {
  if (!std::isfinite(group.beta1) || !std::isfinite(group.beta2) || !std::isfinite(group.eps)) {
    return false;
  }
  return rule.algorithm == UpdateRule::kSgd || (group.beta1 < 1 && group.beta2 < 1);
}

}  // namespace

uint32_t UpdateRule::NumSlots() const {
  if (algorithm == kAdamW) return 3;
  for (const Group& group : groups) {
    if (group.beta1 != 0) return 2;
  }
  return 1;
}

std::string UpdateRule::Describe() const {
  std::string text = algorithm == kAdamW ? "AdamW of " : "SGD of ";
  text += std::to_string(groups.size()) + (groups.size() == 1 ? " group" : " groups");
  text += ", " + std::to_string(4 * NumSlots()) + " bytes of state a parameter";
  return text + (speculative ? ", and its gradient until a step is kept" : "");
}

std::string UpdateRule::Pack() const {
  WireWriter out;
  out.Put(static_cast<uint8_t>(algorithm));
  out.Put(static_cast<uint8_t>(in_order));
  out.Put(static_cast<uint8_t>(speculative));
  out.Put(static_cast<uint8_t>(counts_zeros));
  out.Put(static_cast<uint8_t>(held));
  out.PutSize(groups.size());
  for (const Group& group : groups) {
    for (const double value : {group.beta1, group.beta2, group.eps}) PutDouble(&out, value);
    out.Put(static_cast<uint8_t>(group.nesterov));
  }
  out.PutSize(segments.size());
  for (const Segment& segment : segments) {
    out.Put(segment.end);
    out.Put(segment.group);
    out.Put(static_cast<uint8_t>(segment.counted));
  }
  return out.Take();
}

bool UpdateRule::Unpack(const std::string& text, uint64_t values, UpdateRule* rule) {
  WireReader in(text);
  const uint8_t algorithm = in.Get<uint8_t>();
  if (algorithm != kAdamW && algorithm != kSgd) return false;
  rule->algorithm = static_cast<Algorithm>(algorithm);
  const uint8_t in_order = in.Get<uint8_t>();
  rule->in_order = in_order == 1;
  const uint8_t speculative = in.Get<uint8_t>();
  rule->speculative = speculative == 1;
  const uint8_t counts_zeros = in.Get<uint8_t>();
  rule->counts_zeros = counts_zeros == 1;
  const uint8_t held = in.Get<uint8_t>();
  if (in_order > 1 || speculative > 1 || counts_zeros > 1 || held >= kNumDTypes) return false;
  rule->held = static_cast<DType>(held);
  if (!IsHeld(rule->held)) return false;
  rule->groups.resize(in.GetCount(kGroupBytes));
  for (Group& group : rule->groups) {
    for (double* value : {&group.beta1, &group.beta2, &group.eps}) *value = GetDouble(&in);
    const uint8_t nesterov = in.Get<uint8_t>();
    group.nesterov = nesterov == 1;
    if (nesterov > 1 || !IsUsable(*rule, group)) return false;
  }
  rule->segments.resize(in.GetCount(kSegmentBytes));
  uint64_t end = 0;
  for (Segment& segment : rule->segments) {
    segment.end = in.Get<uint64_t>();
    segment.group = in.Get<uint32_t>();
    const uint8_t counted = in.Get<uint8_t>();
    segment.counted = counted == 1;
    if (counted > 1 || segment.end <= end || segment.group >= rule->groups.size()) return false;
    end = segment.end;
  }
  return in.ok() && in.at_end() && end == values;
}

std::string UpdateStep::Describe() const {
  std::string rate_text, decay_text;
  for (const Rate& rate : rates) {
    rate_text += (rate_text.empty() ? "" : ", ") + Number(rate.learning_rate);
    decay_text += (decay_text.empty() ? "" : ", ") + Number(rate.weight_decay);
  }
  return "step " + std::to_string(number) + (skip ? ", skipped," : "") + " with learning rates " +
         rate_text + ", weight decays " + decay_text + ", gradients times " + Number(grad_scale);
}

std::string UpdateStep::Pack() const {
  WireWriter out;
  out.Put(number);
  PutDouble(&out, grad_scale);
  out.Put(static_cast<uint8_t>(skip));
  out.PutSize(rates.size());
  for (const Rate& rate : rates) {
    PutDouble(&out, rate.learning_rate);
    PutDouble(&out, rate.weight_decay);
  }
  return out.Take();
}

bool UpdateStep::Unpack(const std::string& text, UpdateStep* step) {
  WireReader in(text);
  step->number = in.Get<uint64_t>();
  step->grad_scale = GetDouble(&in);
  const uint8_t skip = in.Get<uint8_t>();
  step->skip = skip == 1;
  step->rates.resize(in.GetCount(kRateBytes));
  for (Rate& rate : step->rates) {
    rate.learning_rate = GetDouble(&in);
    rate.weight_decay = GetDouble(&in);
  }
  return in.ok() && in.at_end() && skip <= 1 && step->number > 0;
}

}  // namespace core
}  // namespace byteps
