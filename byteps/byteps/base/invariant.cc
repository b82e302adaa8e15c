#include "byteps/base/invariant.h"

#include <atomic>

#include "byteps/base/log.h"
#include "byteps/base/mutex.h"

namespace ps {
namespace {

// Limit of log lines: an invariant that is broken continually must not fill the log.
constexpr uint64_t kLogged = 16;

std::atomic<uint64_t> count{0};
Mutex mu;
// The string is never destroyed, because threads may write it while the process ends.
auto* const last PS_PT_GUARDED_BY(mu) = new std::string();

}  // namespace

uint64_t NumBrokenInvariants() { return count.load(std::memory_order_acquire); }

InvariantReport BrokenInvariants() {
  MutexLock lock(&mu);
  return {count, *last};
}

namespace invariant {

std::string Note(const char* name, const char* file, int line, const std::string& seen) {
  const std::string text = std::string("the invariant '") + name + "' was broken: " + seen +
                           "; this is a fault of byteps, please report it with this line";
  uint64_t number = 0;
  {
    MutexLock lock(&mu);
    *last = text;
    number = ++count;
  }
  if (number <= kLogged) WriteLogLine('E', file, line, text);
  return text;
}

void Throw(const char* name, const char* file, int line, const std::string& seen) {
  throw Error(Note(name, file, line, seen), file, line);
}

}  // namespace invariant
}  // namespace ps
