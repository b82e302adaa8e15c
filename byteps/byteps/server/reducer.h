// Additions on a server.
//
// Values are added in their accumulator type, and rounded to their own type once, at the end:
// - half types in fp32;
// - fp32 in fp64, for more than two values (the sum of two is rounded once anyway), unless
//   BYTEPS_SERVER_WIDE_FLOAT32 is off;
// - averages of integers in a type that holds their sum;
// - fp64, and sums of integers (which wrap), in their own type.
//
//   two values:   Add(first, second)                      first is the sum
//   more:         WideBegin(wide, first, second), WideAdd(wide, third) ..., and
//                 WideEnd(last, wide)                     last is the sum
//
// Every pass adds values that have just arrived, and no pass only converts. Counts are in elements.
// Values need no alignment, and must not overlap. A divisor of 1 gives the sum; a divisor of the
// group's size gives the average. Averages are rounded as by division (subnormal fp32 quotients may
// differ by 2^-149). Averages of integers are rounded towards minus infinity, as by
// torch.floor_divide.
#ifndef BYTEPS_SERVER_REDUCER_H_
#define BYTEPS_SERVER_REDUCER_H_

#include <cstddef>
#include <cstdint>

#include "byteps/base/dtype.h"

namespace byteps {
namespace core {

// Returns the bytes of an accumulator of the Wide functions for a value of type `t`; 0 for fp64 and
// blocks, which have no wider type.
size_t AccumulatorSize(DType t);

// Computes sum[i] = (sum[i] + in[i]) / divisor, rounded once.
void Add(DType t, void* sum, const void* in, int divisor, size_t n);

// Computes wide[i] = a[i] + b[i].
void WideBegin(DType t, void* wide, const void* a, const void* b, size_t n);
// Computes wide[i] += in[i].
void WideAdd(DType t, void* wide, const void* in, size_t n);
// Computes last[i] = (wide[i] + last[i]) / divisor, rounded to nearest even.
void WideEnd(DType t, void* last, const void* wide, int divisor, size_t n);

// Scales a sum that lacks members: values[i] = of[i] * times / by, in the accumulator type, rounded
// once. `of`: output of the Wide functions, or null to scale the values themselves. Integers are
// divided if `times` is 1, and otherwise stay as they are.
void Scale(DType t, void* values, const void* of, int times, int by, size_t n);

// Returns the instruction set by which values are added on this machine: "x86-64-v4" (AVX-512),
// "x86-64-v3" (AVX2), "x86-64" (SSE2), "armv8-a" (NEON), or "plain".
const char* InstructionSet();

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_REDUCER_H_
