#ifndef BYTEPS_BASE_SHARED_BYTES_H_
#define BYTEPS_BASE_SHARED_BYTES_H_

#include <cstddef>
#include <memory>
#include <utility>

#include "byteps/base/invariant.h"

namespace byteps {
namespace core {

// The values of a message: reference-counted memory.
//
// Copies share the memory, which is freed with the last copy. A moved-from object is empty.
class SharedBytes {
 public:
  SharedBytes() = default;

  // Returns uninitialised memory. Throws OutOfMemory.
  static SharedBytes New(size_t size) {
    return {std::shared_ptr<char>(NewBytes(size), std::default_delete<char[]>()), size};
  }
  // Wraps foreign memory. Calls `released(data)` when the last copy is destroyed.
  template <typename Released>
  static SharedBytes Borrow(char* data, size_t size, Released released) {
    return {std::shared_ptr<char>(data, std::move(released)), size};
  }
  // Wraps memory of `size` bytes that lives as long as `owner` has copies.
  SharedBytes(std::shared_ptr<char> owner, size_t size) : owner_(std::move(owner)), size_(size) {}

  SharedBytes(const SharedBytes&) = default;
  SharedBytes& operator=(const SharedBytes&) = default;
  SharedBytes(SharedBytes&& other) noexcept { *this = std::move(other); }
  SharedBytes& operator=(SharedBytes&& other) noexcept {
    if (this == &other) return *this;
    owner_ = std::move(other.owner_);
    size_ = std::exchange(other.size_, 0);
    return *this;
  }

  char* data() const { return owner_.get(); }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const std::shared_ptr<char>& owner() const { return owner_; }

  // Returns `size` bytes from `offset`, which share the memory.
  SharedBytes Part(size_t offset, size_t size) const {
    return {std::shared_ptr<char>(owner_, data() + offset), size};
  }

 private:
  std::shared_ptr<char> owner_;
  size_t size_ = 0;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_BASE_SHARED_BYTES_H_
