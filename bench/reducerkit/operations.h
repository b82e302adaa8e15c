// The table of what is measured: one row for each function of the reducer.
#ifndef BENCH_REDUCERKIT_OPERATIONS_H_
#define BENCH_REDUCERKIT_OPERATIONS_H_

#include <functional>
#include <utility>
#include <vector>

#include "byteps/core/dtype.h"
#include "byteps/core/reducer.h"
#include "streams.h"

namespace bench {

using byteps::core::DType;
using byteps::core::IsHalf;

constexpr int kDivisor = 4;

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

inline bool IsWhole(DType t) { return !IsHalf(t); }

// Accumulators: their elements are twice as long as those of the type.
inline float* Wide(char* p) { return reinterpret_cast<float*>(p); }
inline size_t WideSize(DType) { return sizeof(float); }

inline std::vector<Operation> Operations() {
  namespace core = byteps::core;
  return {
      Make<kUpdate, kRead>(
          "sum += in", IsWhole,
          [](DType t, char* a, char* b, char*, size_t n) { core::Add(t, a, b, n); },
          [](double a, double b, double) { return a + b; }),
      Make<kUpdate>(
          "sum /= d", IsWhole,
          [](DType t, char* a, char*, char*, size_t n) { core::Divide(t, a, kDivisor, n); },
          [](double a, double, double) { return a / kDivisor; }),
      Make<kWriteWide, kRead>(
          "wide = in", IsHalf,
          [](DType t, char* a, char* b, char*, size_t n) { core::Widen(t, Wide(a), b, n); },
          [](double, double b, double) { return b; }),
      Make<kUpdateWide, kRead>(
          "wide += in", IsHalf,
          [](DType t, char* a, char* b, char*, size_t n) { core::AddWiden(t, Wide(a), b, n); },
          [](double a, double b, double) { return a + b; }),
      Make<kReadWide, kWrite>(
          "out = wide / d", IsHalf,
          [](DType t, char* a, char* b, char*, size_t n) {
            core::Narrow(t, b, Wide(a), kDivisor, n);
          },
          [](double a, double, double) { return a / kDivisor; }),
  };
}

}  // namespace bench
#endif  // BENCH_REDUCERKIT_OPERATIONS_H_
