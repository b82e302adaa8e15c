// Memory that cannot be had: operator new of this program, as a test wants it.
#ifndef BYTEPS_TESTS_SUPPORT_FAILING_MEMORY_H_
#define BYTEPS_TESTS_SUPPORT_FAILING_MEMORY_H_

#include <cstddef>

namespace byteps {
namespace core {

// While it lives, no thread gets so many bytes, or more, at once.
class NoMemoryFrom {
 public:
  explicit NoMemoryFrom(size_t bytes);
  ~NoMemoryFrom();
};

// While it lives, this thread gets memory so many times, and no more.
class MemoryOnlyTimes {
 public:
  explicit MemoryOnlyTimes(int times);
  ~MemoryOnlyTimes();
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_TESTS_SUPPORT_FAILING_MEMORY_H_
