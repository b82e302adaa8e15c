#ifndef BYTEPS_BASE_RANK_GROUP_H_
#define BYTEPS_BASE_RANK_GROUP_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "byteps/base/mutex.h"

namespace byteps {
namespace core {

// An ascending, immutable list of ranks. Copies of a group share the list, so a copy costs the same
// for 8,192 ranks as for two.
class RankGroup {
 public:
  using value_type = uint32_t;
  using Ranks = std::vector<uint32_t>;
  using const_iterator = Ranks::const_iterator;

  RankGroup() = default;
  RankGroup(Ranks ranks)  // implicit: a list of ranks is a group
      : ranks_(std::make_shared<const Ranks>(std::move(ranks))) {}
  RankGroup(std::initializer_list<uint32_t> ranks) : RankGroup(Ranks(ranks)) {}

  // Returns the ranks 0 to `size` - 1.
  static RankGroup Below(uint32_t size);

  const Ranks& ranks() const {
    static const Ranks none;
    return ranks_ ? *ranks_ : none;
  }
  size_t size() const { return ranks().size(); }
  bool empty() const { return ranks().empty(); }
  uint32_t front() const { return ranks().front(); }
  uint32_t back() const { return ranks().back(); }
  uint32_t operator[](size_t index) const { return ranks()[index]; }
  const_iterator begin() const { return ranks().begin(); }
  const_iterator end() const { return ranks().end(); }

  std::weak_ptr<const Ranks> shared() const { return ranks_; }
  bool IsSharedWith(const RankGroup& other) const { return ranks_ == other.ranks_; }
  friend bool operator==(const RankGroup& a, const RankGroup& b) {
    return a.IsSharedWith(b) || a.ranks() == b.ranks();
  }

 private:
  friend class RankGroups;

  std::shared_ptr<const Ranks> ranks_;
};

// Finds groups with equal ranks, so that equal groups in many messages share memory. It does not
// keep groups alive. Thread-safe.
class RankGroups {
 public:
  // Returns a known group with the same ranks. If there is none, returns `group`, which is known
  // from now on.
  RankGroup Share(const RankGroup& group);

 private:
  ps::Mutex mu_;
  std::unordered_multimap<uint64_t, std::weak_ptr<const RankGroup::Ranks>> known_
      PS_GUARDED_BY(mu_);                    // by a hash of the ranks
  size_t swept_at_ PS_GUARDED_BY(mu_) = 16;  // expired entries are removed at this size
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_BASE_RANK_GROUP_H_
