#include "byteps/base/declaration_list.h"

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "byteps/base/wire.h"

namespace byteps {
namespace core {
namespace {

constexpr uint8_t kAverage = 1;
constexpr uint8_t kHasRule = 2;
constexpr uint8_t kFeedback = 4;
constexpr uint8_t kStochastic = 8;
// A tensor without its name.
constexpr size_t kTensorBytes = 1 + 1 + 8 + 4 + 8 + 4 + 4;

using Groups = std::vector<std::vector<uint32_t>>;

Groups ReadGroups(WireReader* in) {
  Groups groups(in->GetCount(sizeof(uint32_t)));
  for (auto& group : groups) {
    group.resize(in->GetCount(sizeof(uint32_t)));
    for (auto& rank : group) rank = in->Get<uint32_t>();
  }
  return groups;
}

bool IsGroup(const std::vector<uint32_t>& ranks) {
  return !ranks.empty() && std::adjacent_find(ranks.begin(), ranks.end(),
                                              std::greater_equal<uint32_t>()) == ranks.end();
}

bool IsWhole(const Declaration& d) {
  return d.bytes > 0 && d.partition_bytes > 0 && d.bytes % SizeOf(d.dtype) == 0 &&
         d.partition_bytes % SizeOf(d.dtype) == 0 &&
         // Written so that no sum overflows.
         (d.bytes - 1) / d.partition_bytes < kMaxPartitions && IsGroup(d.group);
}

// Of a tensor that is whole.
bool ReadRule(WireReader* in, Declaration* d) {
  auto rule = std::make_shared<UpdateRule>();
  if (!UpdateRule::Unpack(in->GetText(), ValuesIn(d->dtype, d->bytes), rule.get())) return false;
  d->rule = std::move(rule);
  // What comes down is rounded without feedback: it is the difference to what was sent before.
  return IsUpdated(d->dtype) && !d->feedback;
}

// False when it cannot be a tensor.
bool ReadTensor(WireReader* in, const Groups& groups, Declaration* d) {
  const uint8_t dtype = in->Get<uint8_t>();
  const uint8_t flags = in->Get<uint8_t>();
  d->bytes = in->Get<uint64_t>();
  d->partition_bytes = in->Get<uint32_t>();
  d->placement = in->Get<uint64_t>();
  const uint32_t group = in->Get<uint32_t>();
  d->name = in->GetText();
  if (!in->ok() || dtype >= kNumDTypes ||
      (flags & ~(kAverage | kHasRule | kFeedback | kStochastic)) != 0 || group >= groups.size()) {
    return false;
  }
  d->dtype = static_cast<DType>(dtype);
  d->average = (flags & kAverage) != 0;
  d->feedback = (flags & kFeedback) != 0;
  d->stochastic = (flags & kStochastic) != 0;
  if ((d->feedback || d->stochastic) && !IsBlock(d->dtype)) return false;
  d->group = groups[group];
  if (!IsWhole(*d)) return false;
  return (flags & kHasRule) == 0 || ReadRule(in, d);
}

}  // namespace

std::string PackDeclarations(const std::vector<Declaration>& declarations) {
  WireWriter out;
  const Declaration any = declarations.empty() ? Declaration() : declarations.front();
  out.Put(kDeclarationVersion);
  out.Put(static_cast<uint8_t>(any.hash));
  out.Put(any.patience.replica_ranks);
  out.Put(any.patience.quorum);
  out.Put(any.patience.grace_ms);
  std::map<std::vector<uint32_t>, uint32_t> numbers;
  std::vector<const std::vector<uint32_t>*> groups;
  for (const auto& d : declarations) {
    if (numbers.emplace(d.group, groups.size()).second) groups.push_back(&d.group);
  }
  out.PutSize(groups.size());
  for (const auto* group : groups) {
    out.PutSize(group->size());
    for (uint32_t rank : *group) out.Put(rank);
  }
  out.PutSize(declarations.size());
  for (const auto& d : declarations) {
    out.Put(static_cast<uint8_t>(d.dtype));
    out.Put(static_cast<uint8_t>((d.average ? kAverage : 0) | (d.rule ? kHasRule : 0) |
                                 (d.feedback ? kFeedback : 0) | (d.stochastic ? kStochastic : 0)));
    out.Put(d.bytes);
    out.Put(d.partition_bytes);
    out.Put(d.placement);
    out.Put(numbers[d.group]);
    out.PutText(d.name);
    if (d.rule) out.PutText(d.rule->Pack());
  }
  return out.Take();
}

bool UnpackDeclarations(const std::string& text, std::vector<Declaration>* declarations,
                        std::string* error) {
  WireReader in(text);
  const uint8_t version = in.Get<uint8_t>();
  if (in.ok() && version != kDeclarationVersion) {
    *error = "is of version " + std::to_string(version) + ", this server knows version " +
             std::to_string(kDeclarationVersion) + ": install the same byteps on every node";
    return false;
  }
  *error = "does not parse";
  const uint8_t hash = in.Get<uint8_t>();
  Patience patience;
  for (uint32_t* field : {&patience.replica_ranks, &patience.quorum, &patience.grace_ms}) {
    *field = in.Get<uint32_t>();
  }
  if (!in.ok() || hash >= kNumKeyHashes) return false;
  if (patience.replica_ranks == 0 && patience.quorum > 0) return false;
  const Groups groups = ReadGroups(&in);
  const uint32_t count = in.GetCount(kTensorBytes);
  declarations->clear();
  for (uint32_t i = 0; i < count; ++i) {
    Declaration d;
    d.hash = static_cast<KeyHash>(hash);
    d.patience = patience;
    if (!ReadTensor(&in, groups, &d)) return false;
    declarations->push_back(std::move(d));
  }
  if (!in.ok() || !in.at_end()) return false;
  error->clear();
  return true;
}

}  // namespace core
}  // namespace byteps
