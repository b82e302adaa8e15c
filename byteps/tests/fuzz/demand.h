// What a fuzzer's target demands: otherwise the run ends here, with this line.
#ifndef BYTEPS_TESTS_FUZZ_DEMAND_H_
#define BYTEPS_TESTS_FUZZ_DEMAND_H_

#include <cstdio>
#include <cstdlib>

#define DEMAND(condition)                                                            \
  do {                                                                               \
    if (!(condition)) {                                                              \
      fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      abort();                                                                       \
    }                                                                                \
  } while (false)

#endif  // BYTEPS_TESTS_FUZZ_DEMAND_H_
