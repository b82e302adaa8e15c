#include "failing_memory.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace byteps {
namespace core {
namespace {

std::atomic<size_t> refused_from{SIZE_MAX};
thread_local int times_left = -1;  // below 0: no limit

}  // namespace

NoMemoryFrom::NoMemoryFrom(size_t bytes) { refused_from = bytes; }
NoMemoryFrom::~NoMemoryFrom() { refused_from = SIZE_MAX; }

MemoryOnlyTimes::MemoryOnlyTimes(int times) { times_left = times; }
MemoryOnlyTimes::~MemoryOnlyTimes() { times_left = -1; }

void* TakeMemory(size_t bytes) {
  if (bytes >= refused_from || times_left == 0) throw std::bad_alloc();
  if (times_left > 0) --times_left;
  void* const memory = malloc(bytes > 0 ? bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace core
}  // namespace byteps

// The forms for arrays, and those that do not throw, call these.
void* operator new(size_t bytes) { return byteps::core::TakeMemory(bytes); }
void operator delete(void* memory) noexcept { free(memory); }
void operator delete(void* memory, size_t /*bytes*/) noexcept { free(memory); }
