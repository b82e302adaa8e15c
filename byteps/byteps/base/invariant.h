// What the code takes for granted, checked wherever it runs: in tests, simulations and releases.
//
//   BPS_INVARIANT("a block is returned once", in_use_ >= size, "block of " + std::to_string(size));
//
// The check is one predictable branch.  The last argument, what was seen, is evaluated only where
// the invariant is broken.  docs/design/reliability.md lists all of them by name.
//
// A broken invariant ends the job, but not the process: it is logged and counted, and
// - BPS_INVARIANT throws Error, so that the operation or the connection fails at once;
// - BPS_INVARIANT_NOTED goes on, for destructors and callbacks, which must not throw.
// Either way the membership (net/membership/membership.h) fails the job within a heartbeat, and
// every node gets an error that names the node and the invariant.
#ifndef BYTEPS_BASE_INVARIANT_H_
#define BYTEPS_BASE_INVARIANT_H_

#include <cstdint>
#include <string>

#include "byteps/base/error.h"

namespace ps {

struct InvariantReport {
  uint64_t count = 0;  // broken by this process so far
  std::string last;    // "the invariant 'a block is returned once' was broken: ..."
};
InvariantReport BrokenInvariants();
// The count alone, without a lock.
uint64_t NumBrokenInvariants();

namespace invariant {

// Logs and counts a broken one.  Returns what to say of it.
std::string Note(const char* name, const char* file, int line, const std::string& seen);

// The same, and throws Error.
[[noreturn, gnu::cold]] void Throw(const char* name, const char* file, int line,
                                   const std::string& seen);

}  // namespace invariant
}  // namespace ps

#define BPS_INVARIANT(name, holds, seen)                      \
  do {                                                        \
    if (__builtin_expect(!(holds), 0)) {                      \
      ::ps::invariant::Throw(name, __FILE__, __LINE__, seen); \
    }                                                         \
  } while (0)

#define BPS_INVARIANT_NOTED(name, holds, seen)                                                \
  do {                                                                                        \
    if (__builtin_expect(!(holds), 0)) ::ps::invariant::Note(name, __FILE__, __LINE__, seen); \
  } while (0)

#endif  // BYTEPS_BASE_INVARIANT_H_
