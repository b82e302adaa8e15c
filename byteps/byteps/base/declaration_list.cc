#include "byteps/base/declaration_list.h"

#include <algorithm>
#include <functional>
#include <map>
#include <type_traits>
#include <utility>

namespace byteps {
namespace core {
namespace {

constexpr uint8_t kFused = 1;
constexpr uint8_t kAverage = 1;
// A tensor without its name.
constexpr size_t kTensorBytes = 1 + 1 + 8 + 4 + 8 + 4 + 4;

class Writer {
 public:
  template <typename T>
  void Put(T value) {
    static_assert(std::is_unsigned<T>::value, "fixed-width unsigned numbers only");
    for (size_t i = 0; i < sizeof(T); ++i) {
      out_.push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i)));
    }
  }
  void PutSize(size_t size) { Put(static_cast<uint32_t>(size)); }
  void PutText(const std::string& text) {
    PutSize(text.size());
    out_ += text;
  }
  std::string Take() { return std::move(out_); }

 private:
  std::string out_;
};

// Reads past the end are zero, and make ok() false.
class Reader {
 public:
  explicit Reader(const std::string& in) : in_(in) {}

  template <typename T>
  T Get() {
    if (!Has(sizeof(T))) return 0;
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(T); ++i) {
      value |= static_cast<uint64_t>(static_cast<unsigned char>(in_[at_++])) << (8 * i);
    }
    return static_cast<T>(value);
  }

  // A count of things that take at least `each` bytes; 0 when so many cannot follow.
  uint32_t GetCount(size_t each) {
    const uint32_t count = Get<uint32_t>();
    return Has(static_cast<uint64_t>(count) * each) ? count : 0;
  }

  std::string GetText() {
    const uint32_t size = GetCount(1);
    at_ += size;
    return in_.substr(at_ - size, size);
  }

  bool ok() const { return ok_; }
  bool at_end() const { return at_ == in_.size(); }

 private:
  bool Has(uint64_t bytes) {
    ok_ = ok_ && bytes <= in_.size() - at_;
    return ok_;
  }

  const std::string& in_;
  size_t at_ = 0;
  bool ok_ = true;
};

using Groups = std::vector<std::vector<uint32_t>>;

Groups ReadGroups(Reader* in) {
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

// False when it cannot be a tensor.
bool ReadTensor(Reader* in, const Groups& groups, Declaration* d) {
  const uint8_t dtype = in->Get<uint8_t>();
  const uint8_t flags = in->Get<uint8_t>();
  d->bytes = in->Get<uint64_t>();
  d->partition_bytes = in->Get<uint32_t>();
  d->placement = in->Get<uint64_t>();
  const uint32_t group = in->Get<uint32_t>();
  d->name = in->GetText();
  if (!in->ok() || dtype >= kNumDTypes || flags > kAverage || group >= groups.size()) return false;
  d->dtype = static_cast<DType>(dtype);
  d->average = (flags & kAverage) != 0;
  d->group = groups[group];
  return IsWhole(*d);
}

}  // namespace

std::string PackDeclarations(const std::vector<Declaration>& declarations) {
  Writer out;
  const Declaration any = declarations.empty() ? Declaration() : declarations.front();
  out.Put(kDeclarationVersion);
  out.Put(static_cast<uint8_t>(any.hash));
  out.Put(static_cast<uint8_t>(any.fused ? kFused : 0));
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
    out.Put(static_cast<uint8_t>(d.average ? kAverage : 0));
    out.Put(d.bytes);
    out.Put(d.partition_bytes);
    out.Put(d.placement);
    out.Put(numbers[d.group]);
    out.PutText(d.name);
  }
  return out.Take();
}

bool UnpackDeclarations(const std::string& text, std::vector<Declaration>* declarations,
                        std::string* error) {
  Reader in(text);
  const uint8_t version = in.Get<uint8_t>();
  if (in.ok() && version != kDeclarationVersion) {
    *error = "is of version " + std::to_string(version) + ", this server knows version " +
             std::to_string(kDeclarationVersion) + ": install the same byteps on every node";
    return false;
  }
  *error = "does not parse";
  const uint8_t hash = in.Get<uint8_t>();
  const uint8_t flags = in.Get<uint8_t>();
  if (!in.ok() || hash >= kNumKeyHashes || flags > kFused) return false;
  const Groups groups = ReadGroups(&in);
  const uint32_t count = in.GetCount(kTensorBytes);
  declarations->clear();
  for (uint32_t i = 0; i < count; ++i) {
    Declaration d;
    d.hash = static_cast<KeyHash>(hash);
    d.fused = (flags & kFused) != 0;
    if (!ReadTensor(&in, groups, &d)) return false;
    declarations->push_back(std::move(d));
  }
  if (!in.ok() || !in.at_end()) return false;
  error->clear();
  return true;
}

}  // namespace core
}  // namespace byteps
