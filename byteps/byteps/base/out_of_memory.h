// Memory for values, which a process may not get.
#ifndef BYTEPS_BASE_OUT_OF_MEMORY_H_
#define BYTEPS_BASE_OUT_OF_MEMORY_H_

#include <cstddef>
#include <new>

namespace byteps {
namespace core {

// A std::bad_alloc that knows how much was wanted.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(size_t bytes) : bytes_(bytes) {}
  const char* what() const noexcept override { return "out of memory"; }
  size_t bytes() const { return bytes_; }

 private:
  const size_t bytes_;
};

// Uninitialised, for delete[].  Throws OutOfMemory.
inline char* NewBytes(size_t bytes) {
  char* const memory = new (std::nothrow) char[bytes];
  if (memory == nullptr) throw OutOfMemory(bytes);
  return memory;
}

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_BASE_OUT_OF_MEMORY_H_
