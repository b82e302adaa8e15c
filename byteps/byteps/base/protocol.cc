#include "byteps/base/protocol.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <unordered_map>
#include <utility>

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
  const uint8_t speculative = in.Get<uint8_t>();
  rule->speculative = speculative == 1;
  const uint8_t counts_zeros = in.Get<uint8_t>();
  rule->counts_zeros = counts_zeros == 1;
  const uint8_t held = in.Get<uint8_t>();
  if (speculative > 1 || counts_zeros > 1 || held >= kNumDTypes) return false;
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

uint64_t HashBytes(const void* data, size_t size, uint64_t seed) {
  uint64_t hash = 14695981039346656037ull ^ seed;
  const auto* p = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < size; ++i) hash = (hash ^ p[i]) * 1099511628211ull;
  return hash;
}

const char* NameOf(KeyHash hash) {
  static const char* const kNames[] = {"raw", "djb2"};
  return kNames[static_cast<size_t>(hash)];
}

namespace {

uint64_t KeyOf(const Declaration& d, uint32_t releases) {
  const uint32_t lowest = d.group.empty() ? 0 : d.group.front();
  const uint64_t seed = HashBytes(&lowest, sizeof(lowest), releases);
  return HashBytes(d.name.data(), d.name.size(), seed) << kPartitionBits;
}

}  // namespace

uint64_t Declaration::Key() const { return KeyOf(*this, releases); }

uint64_t Declaration::KeyOfName() const { return KeyOf(*this, 0); }

uint64_t Declaration::PartitionSize(uint64_t index) const {
  return std::min<uint64_t>(partition_bytes, bytes - index * partition_bytes);
}

uint32_t Declaration::MostRoundsOpen() const {
  constexpr uint64_t kMostBytes = 1ull << 30;
  constexpr uint64_t kLeast = 16;
  constexpr uint64_t kMost = 1024;
  return static_cast<uint32_t>(std::clamp(kMostBytes / bytes, kLeast, kMost));
}

int Declaration::MemberIndex(uint32_t rank) const {
  const auto it = std::lower_bound(group.begin(), group.end(), rank);
  if (it == group.end() || *it != rank) return -1;
  return static_cast<int>(it - group.begin());
}

std::string Declaration::Describe() const {
  std::string ranks;
  for (uint32_t rank : group) ranks += (ranks.empty() ? "" : ",") + std::to_string(rank);
  return std::string(NameOf(dtype)) + ", " + std::to_string(bytes) + " bytes in partitions of " +
         std::to_string(partition_bytes) + ", " + (average ? "average" : "sum") +
         (feedback ? " with feedback" : "") + (stochastic ? ", rounded by chance," : "") +
         (in_order ? " in the order of ranks" : "") + " over ranks " + ranks + ", placement " +
         std::to_string(placement) +
         (hash == KeyHash::kRaw
              ? ""
              : std::string(", dealt by BYTEPS_KEY_HASH_FN=") + byteps::core::NameOf(hash)) +
         (patience.quorum > 0 ? ", " + patience.Describe() : "") +
         (rule ? ", updated by " + rule->Describe() : "") +
         (releases > 0 ? ", declared anew after " + std::to_string(releases) + " releases" : "");
}

std::string Patience::Describe() const {
  char text[64];
  snprintf(text, sizeof(text), "quorum %u@%g", quorum, grace_ms / 1e3);
  return text;
}

std::string PushHeader::Pack() const {
  WireWriter out;
  for (uint32_t field : {round, timeout_ms, pull_offset, pull_bytes, oldest, flags}) out.Put(field);
  out.Put(confirmed);
  return out.Take();
}

std::string KeptAnswer::Pack() const {
  WireWriter out;
  out.Put(ended);
  out.Put(serial);
  out.Put(with_all);
  return out.Take();
}

bool KeptAnswer::Take(std::string* text, KeptAnswer* answer) {
  WireReader in(*text);
  answer->ended = in.Get<uint32_t>();
  answer->serial = in.Get<uint64_t>();
  answer->with_all = in.Get<uint64_t>();
  if (!in.ok()) return false;
  text->erase(0, kBytes);
  return true;
}

std::string PackMembers(const std::vector<bool>& members) {
  std::string text((members.size() + 7) / 8, '\0');
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i]) text[i / 8] = static_cast<char>(text[i / 8] | (1 << (i % 8)));
  }
  return text;
}

std::vector<size_t> UnpackMembers(const std::string& text, size_t size) {
  std::vector<size_t> members;
  for (size_t i = 0; i < std::min(size, text.size() * 8); ++i) {
    if (((static_cast<unsigned char>(text[i / 8]) >> (i % 8)) & 1) != 0) members.push_back(i);
  }
  return members;
}

bool PushHeader::Unpack(const std::string& text, PushHeader* header) {
  WireReader in(text);
  for (uint32_t* field : {&header->round, &header->timeout_ms, &header->pull_offset,
                          &header->pull_bytes, &header->oldest, &header->flags}) {
    *field = in.Get<uint32_t>();
  }
  header->confirmed = in.Get<uint64_t>();
  return in.ok() && in.at_end();
}

bool PushHeader::Unpack(const std::string& text, PushHeader* header, std::string* rest) {
  if (text.size() < kBytes) return false;
  *rest = text.substr(kBytes);
  return Unpack(text.substr(0, kBytes), header);
}

bool Declaration::operator==(const Declaration& o) const {
  return name == o.name && releases == o.releases && dtype == o.dtype && average == o.average &&
         in_order == o.in_order && feedback == o.feedback && stochastic == o.stochastic &&
         bytes == o.bytes && partition_bytes == o.partition_bytes && placement == o.placement &&
         hash == o.hash && patience == o.patience && group == o.group &&
         (rule == o.rule || (rule && o.rule && *rule == *o.rule));
}

namespace {

constexpr uint8_t kAverage = 1;
constexpr uint8_t kHasRule = 2;
constexpr uint8_t kFeedback = 4;
constexpr uint8_t kStochastic = 8;
constexpr uint8_t kInOrder = 16;
constexpr uint8_t kAllFlags = kAverage | kHasRule | kFeedback | kStochastic | kInOrder;
// Size of a tensor's entry without its name.
constexpr size_t kTensorBytes = 1 + 1 + 8 + 4 + 8 + 4 + 4 + 4;

bool IsGroup(const RankGroup::Ranks& ranks) {
  return !ranks.empty() && std::adjacent_find(ranks.begin(), ranks.end(),
                                              std::greater_equal<uint32_t>()) == ranks.end();
}

// Returns false if a group is invalid.
bool ReadGroups(WireReader* in, RankGroups* known, std::vector<RankGroup>* groups) {
  groups->resize(in->GetCount(sizeof(uint32_t)));
  for (RankGroup& group : *groups) {
    RankGroup::Ranks ranks(in->GetCount(sizeof(uint32_t)));
    for (auto& rank : ranks) rank = in->Get<uint32_t>();
    if (!IsGroup(ranks)) return false;
    group = std::move(ranks);
    if (known != nullptr) group = known->Share(group);
  }
  return true;
}

// The distinct groups of a list of declarations.
class GroupList {
 public:
  // Returns the group's index.
  uint32_t Add(const RankGroup& group) {
    const auto [it, is_new] = by_ranks_.emplace(&group.ranks(), groups_.size());
    if (!is_new) return it->second;
    const auto same = std::find(groups_.begin(), groups_.end(), group);
    it->second = static_cast<uint32_t>(same - groups_.begin());
    if (same == groups_.end()) groups_.push_back(group);
    return it->second;
  }
  const std::vector<RankGroup>& groups() const { return groups_; }

 private:
  // Index of each group in the list, by the address of its shared ranks.
  std::unordered_map<const RankGroup::Ranks*, uint32_t> by_ranks_;
  std::vector<RankGroup> groups_;
};

bool IsWhole(const Declaration& d) {
  return d.bytes > 0 && d.partition_bytes > 0 && d.bytes % SizeOf(d.dtype) == 0 &&
         d.partition_bytes % SizeOf(d.dtype) == 0 &&
         // The expression is written so that no sum overflows.
         (d.bytes - 1) / d.partition_bytes < kMaxPartitions;
}

// Reads the update rule of a tensor whose other fields are valid. Returns false if the rule is not
// valid for this tensor.
bool ReadRule(WireReader* in, Declaration* d) {
  auto rule = std::make_shared<UpdateRule>();
  if (!UpdateRule::Unpack(in->GetText(), ValuesIn(d->dtype, d->bytes), rule.get())) return false;
  d->rule = std::move(rule);
  // Each difference is relative to the values that were sent last. So it includes the rounding
  // error of the difference before, and an updated tensor needs no error feedback.
  return IsUpdated(d->dtype) && !d->feedback;
}

// Reads the declaration of a tensor. Returns false if it is not valid.
bool ReadTensor(WireReader* in, const std::vector<RankGroup>& groups, Declaration* d) {
  const uint8_t dtype = in->Get<uint8_t>();
  const uint8_t flags = in->Get<uint8_t>();
  d->bytes = in->Get<uint64_t>();
  d->partition_bytes = in->Get<uint32_t>();
  d->placement = in->Get<uint64_t>();
  const uint32_t group = in->Get<uint32_t>();
  d->releases = in->Get<uint32_t>();
  d->name = in->GetText();
  if (!in->ok() || dtype >= kNumDTypes || (flags & ~kAllFlags) != 0 || group >= groups.size()) {
    return false;
  }
  d->dtype = static_cast<DType>(dtype);
  d->average = (flags & kAverage) != 0;
  d->feedback = (flags & kFeedback) != 0;
  d->stochastic = (flags & kStochastic) != 0;
  d->in_order = (flags & kInOrder) != 0;
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
  GroupList groups;
  for (const auto& d : declarations) groups.Add(d.group);
  out.PutSize(groups.groups().size());
  for (const RankGroup& group : groups.groups()) {
    out.PutSize(group.size());
    for (const uint32_t rank : group) out.Put(rank);
  }
  out.PutSize(declarations.size());
  for (const auto& d : declarations) {
    out.Put(static_cast<uint8_t>(d.dtype));
    out.Put(static_cast<uint8_t>((d.average ? kAverage : 0) | (d.rule ? kHasRule : 0) |
                                 (d.feedback ? kFeedback : 0) | (d.stochastic ? kStochastic : 0) |
                                 (d.in_order ? kInOrder : 0)));
    out.Put(d.bytes);
    out.Put(d.partition_bytes);
    out.Put(d.placement);
    out.Put(groups.Add(d.group));
    out.Put(d.releases);
    out.PutText(d.name);
    if (d.rule) out.PutText(d.rule->Pack());
  }
  return out.Take();
}

bool UnpackDeclarations(const std::string& text, std::vector<Declaration>* declarations,
                        std::string* error, RankGroups* known_groups) {
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
  std::vector<RankGroup> groups;
  if (!ReadGroups(&in, known_groups, &groups)) return false;
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

KeyHash ParseKeyHash(const std::string& name) {
  return name == "djb2" ? KeyHash::kDjb2 : KeyHash::kRaw;
}

int ServerOf(KeyHash hash, uint64_t key, uint64_t placement, uint64_t index, int num_servers) {
  const uint64_t k = static_cast<uint64_t>(num_servers);
  if (placement & kOnOneServer) return static_cast<int>((placement & ~kOnOneServer) % k);
  if (hash == KeyHash::kRaw) return static_cast<int>((placement % k + index) % k);
  uint64_t h = 5381;
  for (char c : std::to_string(key + index)) h = h * 33 + static_cast<unsigned char>(c);
  return static_cast<int>(h % k);
}

uint32_t PartitionBytes(DType dtype, uint64_t bytes, int num_servers, double link_bytes_per_s,
                        uint32_t smallest, uint32_t largest) {
  const uint64_t unit = IsBlock(dtype) ? kBlocksOfPartition * SizeOf(dtype) : sysconf(_SC_PAGESIZE);
  const auto whole = [unit](uint64_t n) { return (n + unit - 1) / unit * unit; };
  const uint64_t pieces =
      std::min(kPartitionsPerServer * static_cast<uint64_t>(num_servers), kMaxPartitions);
  const double a_server = static_cast<double>(bytes) / num_servers;
  const auto worth = static_cast<uint64_t>(sqrt(a_server * link_bytes_per_s * kPartitionSeconds));
  const uint64_t wanted = whole(std::max((bytes + pieces - 1) / pieces, worth));
  // A partition is shorter than a unit only if `largest` is.
  const uint64_t most =
      largest >= unit ? largest / unit * unit : largest / SizeOf(dtype) * SizeOf(dtype);
  uint64_t least = smallest;
  if (least == 0) {
    const double carried = link_bytes_per_s * kShortestSeconds;
    least = link_bytes_per_s == 0 || carried > kMostSmallest ? kMostSmallest
                                                             : static_cast<uint64_t>(carried);
    least = std::max(least, kLeastSmallest);
  }
  least = std::min(whole(least), most);
  return static_cast<uint32_t>(std::min(std::max(wanted, least), most));
}

}  // namespace core
}  // namespace byteps
