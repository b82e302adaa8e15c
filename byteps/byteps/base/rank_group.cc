#include "byteps/base/rank_group.h"

#include <algorithm>
#include <numeric>

namespace byteps {
namespace core {
namespace {

// Returns a hash of the ranks, in whole words because groups are long.
uint64_t HashOf(const RankGroup::Ranks& ranks) {
  uint64_t hash = ranks.size();
  for (const uint32_t rank : ranks) hash = (hash ^ rank) * 0x9e3779b97f4a7c15ull;
  return hash;
}

}  // namespace

RankGroup RankGroup::Below(uint32_t size) {
  Ranks ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

RankGroup RankGroups::Share(const RankGroup& group) {
  const uint64_t hash = HashOf(group.ranks());
  ps::MutexLock lock(&mu_);
  const auto [begin, end] = known_.equal_range(hash);
  for (auto it = begin; it != end; ++it) {
    RankGroup known;
    known.ranks_ = it->second.lock();
    if (known.ranks_ && known == group) return known;
  }
  if (known_.size() >= swept_at_) {
    std::erase_if(known_, [](const auto& entry) { return entry.second.expired(); });
    swept_at_ = std::max(swept_at_, 2 * known_.size());
  }
  known_.emplace(hash, group.ranks_);
  return group;
}

}  // namespace core
}  // namespace byteps
