#include "failing_memory.h"

#include <atomic>
#include <cstdint>
#include <new>

namespace byteps {
namespace core {
namespace {

std::atomic<size_t> refused_from{SIZE_MAX};
thread_local int times_left = -1;  // below 0: no limit

}  // namespace

static bool Refused(size_t bytes) {
  if (bytes >= refused_from || times_left == 0) return true;
  if (times_left > 0) --times_left;
  return false;
}

NoMemoryFrom::NoMemoryFrom(size_t bytes) { refused_from = bytes; }
NoMemoryFrom::~NoMemoryFrom() { refused_from = SIZE_MAX; }

MemoryOnlyTimes::MemoryOnlyTimes(int times) { times_left = times; }
MemoryOnlyTimes::~MemoryOnlyTimes() { times_left = -1; }

}  // namespace core
}  // namespace byteps

// The linker sends each call of operator new, and of its forms for arrays, here
// (cmake/Tests.cmake). Replacing the operators would take them from a sanitizer, which would then
// see memory freed that it never gave. NOLINTBEGIN(bugprone-reserved-identifier): the linker's
// names
extern "C" {
void* __real__Znwm(size_t bytes);
void* __real__Znam(size_t bytes);
void* __real__ZnamRKSt9nothrow_t(size_t bytes, const std::nothrow_t& nothrow);

void* __wrap__Znwm(size_t bytes) {
  if (byteps::core::Refused(bytes)) throw std::bad_alloc();
  return __real__Znwm(bytes);
}

void* __wrap__Znam(size_t bytes) {
  if (byteps::core::Refused(bytes)) throw std::bad_alloc();
  return __real__Znam(bytes);
}

void* __wrap__ZnamRKSt9nothrow_t(size_t bytes, const std::nothrow_t& nothrow) {
  return byteps::core::Refused(bytes) ? nullptr : __real__ZnamRKSt9nothrow_t(bytes, nothrow);
}
}
// NOLINTEND(bugprone-reserved-identifier)
