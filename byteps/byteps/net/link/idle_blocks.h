#ifndef BYTEPS_NET_LINK_IDLE_BLOCKS_H_
#define BYTEPS_NET_LINK_IDLE_BLOCKS_H_

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "byteps/base/invariant.h"

namespace ps {

// Blocks of memory that nobody uses, kept to be used again: fresh pages cost as much as what is
// done with them, and registering them costs more.
//
// T: a pointer to a block, which is its owner's.  Locked by its owner.
template <typename T>
class IdleBlocks {
 public:
  // Keeps at most `limit` bytes.
  explicit IdleBlocks(size_t limit) : limit_(limit) {}

  // One of exactly this size.  False: there is none.
  bool Take(size_t size, T* block) {
    const auto it = blocks_.find(size);
    if (it == blocks_.end() || it->second.empty()) return false;
    *block = it->second.back();
    it->second.pop_back();
    BPS_INVARIANT_NOTED("bytes kept are those of the blocks kept", bytes_ >= size,
                        std::to_string(bytes_) + " with a block of " + std::to_string(size));
    bytes_ -= size;
    return true;
  }

  // False: these would be more bytes than it keeps.
  bool Keep(size_t size, T block) {
    if (bytes_ + size > limit_) return false;
    blocks_[size].push_back(block);
    bytes_ += size;
    return true;
  }

  std::vector<T> TakeAll() {
    std::vector<T> all;
    for (const auto& entry : blocks_)
      all.insert(all.end(), entry.second.begin(), entry.second.end());
    blocks_.clear();
    bytes_ = 0;
    return all;
  }

 private:
  const size_t limit_;
  std::map<size_t, std::vector<T>> blocks_;  // by size
  size_t bytes_ = 0;
};

}  // namespace ps
#endif  // BYTEPS_NET_LINK_IDLE_BLOCKS_H_
