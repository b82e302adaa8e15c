// The additions that a server makes.
//
// Counts are in elements.  Pointers need no alignment.  Integers wrap.
#ifndef BYTEPS_CORE_REDUCER_H_
#define BYTEPS_CORE_REDUCER_H_

#include <cstddef>
#include <cstdint>

#include "dtype.h"

namespace byteps {
namespace core {

// sum[i] += in[i], for every type but the half ones.
void Add(DType t, void* sum, const void* in, size_t n);

// sum[i] /= divisor; integers are rounded towards minus infinity, as
// torch.floor_divide does.  Not for the half types.
void Divide(DType t, void* sum, int divisor, size_t n);

// The half types: sums are kept in fp32 from the first value to the last.
void Widen(DType t, float* sum, const void* in, size_t n);     // sum[i] = in[i]
void AddWiden(DType t, float* sum, const void* in, size_t n);  // sum[i] += in[i]
// out[i] = sum[i] / divisor, rounded once, to nearest even.
void Narrow(DType t, void* out, const float* sum, int divisor, size_t n);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_CORE_REDUCER_H_
