// The additions that a server makes.
//
// Values are added in their accumulator type and rounded to their own type once,
// at the end: half types in fp32; fp32 in fp64 when there are more than two values
// (the sum of two is rounded once either way) and the server was not told
// otherwise; averages of integers in a type that holds their sum; fp64, and sums of
// integers, which wrap, in their own type.
//
//   two values:   Add(first, second)                      first is the sum
//   more:         WideBegin(wide, first, second), WideAdd(wide, third) ..., and
//                 WideEnd(last, wide)                     last is the sum
//
// No pass only converts: each reads a value that has just come.  Counts are in
// elements.  Values need no alignment; the memory that is passed must not overlap.
// A divisor of 1 gives the sum, the size of the group the average, rounded as a
// division rounds it (but for subnormal quotients of fp32, which may differ by
// 2^-149); integers are rounded towards minus infinity, as torch.floor_divide
// does.
#ifndef BYTEPS_SERVER_REDUCER_H_
#define BYTEPS_SERVER_REDUCER_H_

#include <cstddef>
#include <cstdint>

#include "byteps/base/dtype.h"

namespace byteps {
namespace core {

// Bytes of a value of type `t` as the Wide functions accumulate it; 0 for fp64 and
// blocks, for which there are none.
size_t AccumulatorSize(DType t);

// sum[i] = (sum[i] + in[i]) / divisor, rounded once.
void Add(DType t, void* sum, const void* in, int divisor, size_t n);

// wide[i] = a[i] + b[i]
void WideBegin(DType t, void* wide, const void* a, const void* b, size_t n);
// wide[i] += in[i]
void WideAdd(DType t, void* wide, const void* in, size_t n);
// last[i] = (wide[i] + last[i]) / divisor, rounded to nearest even.
void WideEnd(DType t, void* last, const void* wide, int divisor, size_t n);

// values[i] = of[i] * times / by, in the accumulator type, rounded once: what becomes of a sum that
// some members are missing in.  `of`: what the Wide functions accumulated; null: the values
// themselves.
// Integers are divided if `times` is 1, and else left alone.
void Scale(DType t, void* values, const void* of, int times, int by, size_t n);

// The instructions that the additions use on this machine: "x86-64-v4" (AVX-512), "x86-64-v3"
// (AVX2), "x86-64" (SSE2), "armv8-a" (NEON), or "plain".
const char* InstructionSet();

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_REDUCER_H_
