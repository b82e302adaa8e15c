#ifndef BYTEPS_SERVER_SCRATCH_H_
#define BYTEPS_SERVER_SCRATCH_H_

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"

namespace byteps {
namespace core {

// Memory for accumulators. It is reused, not allocated anew for each sum.
//
// A Scratch is a stack of unused blocks. Each SumThread has its own Scratch.
class Scratch {
 public:
  // Block of uninitialised bytes. It is empty after it was moved from.
  class Block {
   public:
    Block() = default;
    explicit Block(size_t size) : bytes_(NewBytes(size)), size_(size) {}
    Block(Block&& other) noexcept
        : bytes_(std::move(other.bytes_)), size_(std::exchange(other.size_, 0)) {}
    Block& operator=(Block&& other) noexcept {
      bytes_ = std::move(other.bytes_);
      size_ = std::exchange(other.size_, 0);
      return *this;
    }
    char* data() { return bytes_.get(); }
    size_t size() const { return size_; }

   private:
    std::unique_ptr<char[]> bytes_;
    size_t size_ = 0;
  };

  // Returns at least `size` bytes. Throws OutOfMemory.
  Block Take(size_t size) {
    while (!spare_.empty()) {
      Block block = std::move(spare_.back());
      spare_.pop_back();
      kept_ -= block.size();
      BPS_INVARIANT("a scratch block has its memory", block.data() != nullptr,
                    "a block of " + std::to_string(block.size()) + " bytes has none");
      if (block.size() >= size) return block;  // blocks that are too small are freed
    }
    return Block(size);
  }

  // Returns a block, or frees it if enough blocks are unused.
  void Return(Block block) {
    if (block.size() == 0 || kept_ + block.size() > kMaxKept) return;
    const size_t size = block.size();
    try {
      spare_.push_back(std::move(block));
      kept_ += size;
    } catch (const std::bad_alloc&) {
      // If memory is short, freeing the block is right.
    }
  }

 private:
  // Limit of the bytes of unused blocks. Further blocks are freed. The limit is enough for a few
  // partitions in flight. Keeping blocks for all keys would double a server's memory.
  static constexpr size_t kMaxKept = 64 << 20;

  std::vector<Block> spare_;
  size_t kept_ = 0;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_SCRATCH_H_
