// The table of what is measured: one row for each function of the reducer.
#ifndef BENCH_REDUCERKIT_OPERATIONS_H_
#define BENCH_REDUCERKIT_OPERATIONS_H_

#include <functional>
#include <utility>
#include <vector>

#include "byteps/base/dtype.h"
#include "byteps/server/reducer.h"
#include "streams.h"

namespace bench {

using byteps::core::DType;

// An operation over the first n elements of three buffers.
using Run = std::function<void(DType, char*, char*, char*, size_t)>;
// An instance of Touch.
using Plain = void (*)(char*, char*, char*, size_t steps);

struct Operation {
  const char* name;
  bool (*is_for)(DType);
  Stream streams[3];
  Plain plain;
  Run run;
  // What the written buffer then holds, of the three values there were before.
  double (*expected)(double, double, double);
};

template <Stream A, Stream B = Stream{}, Stream C = Stream{}>
Operation Make(const char* name, bool (*is_for)(DType), Run run,
               double (*expected)(double, double, double)) {
  return {name, is_for, {A, B, C}, &Touch<A, B, C>, std::move(run), expected};
}

// Accumulators: their elements are twice as long as those of the type.
inline size_t WideSize(DType t) { return byteps::core::SizeOf(byteps::core::AccumulatorOf(t)); }
inline bool IsAny(DType) { return true; }
inline bool IsWidened(DType t) { return byteps::core::AccumulatorOf(t) != t; }

// Operations that divide, for sums and for averages over some number of workers.
template <int divisor>
void AddDividing(std::vector<Operation>* table, const char* add, const char* end) {
  namespace core = byteps::core;
  table->push_back(Make<kUpdate, kRead>(
      add, IsAny,
      [](DType t, char* a, char* b, char*, size_t n) { core::Add(t, a, b, divisor, n); },
      [](double a, double b, double) { return (a + b) / divisor; }));
  table->push_back(Make<kUpdate, kReadWide>(
      end, IsWidened,
      [](DType t, char* a, char* b, char*, size_t n) { core::WideEnd(t, a, b, divisor, n); },
      [](double a, double b, double) { return (a + b) / divisor; }));
}

inline std::vector<Operation> Operations() {
  namespace core = byteps::core;
  std::vector<Operation> table = {
      Make<kWriteWide, kRead, kRead>(
          "wide = a + b", IsWidened,
          [](DType t, char* a, char* b, char* c, size_t n) { core::WideBegin(t, a, b, c, n); },
          [](double, double b, double c) { return b + c; }),
      Make<kUpdateWide, kRead>(
          "wide += in", IsWidened,
          [](DType t, char* a, char* b, char*, size_t n) { core::WideAdd(t, a, b, n); },
          [](double a, double b, double) { return a + b; }),
  };
  AddDividing<1>(&table, "sum += in", "last += wide");
  // A power of two is multiplied by its inverse, and others are not.
  AddDividing<4>(&table, "sum = (sum + in) / 4", "last = (wide + last) / 4");
  AddDividing<3>(&table, "sum = (sum + in) / 3", "last = (wide + last) / 3");
  return table;
}

}  // namespace bench
#endif  // BENCH_REDUCERKIT_OPERATIONS_H_
