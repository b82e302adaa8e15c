#ifndef BYTEPS_NET_LINK_IDLE_BLOCKS_H_
#define BYTEPS_NET_LINK_IDLE_BLOCKS_H_

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "byteps/base/invariant.h"

namespace ps {

// Free list of memory blocks. Blocks are reused, because the kernel needs as long to provide fresh
// pages as the work in them takes, and registering pages takes even longer.
//
// T is a pointer to a block; the caller owns the blocks and locks this object.
template <typename T>
class IdleBlocks {
 public:
  // Keeps at most `limit` bytes.
  explicit IdleBlocks(size_t limit) : limit_(limit) {}

  // Takes a block of exactly this size. Returns false if there is none.
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

  // Adds an unused block. Returns false if the limit does not allow this block.
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
