// Updates of parameters: AdamW, and SGD with momentum, over fp32 state.
//
// The arithmetic is that of torch.optim (AdamW and SGD, foreach=False, fp32 on a CPU with AVX2),
// operation by operation, and fused where torch fuses. So every CPU computes the same bits.
// Coefficients are computed in fp64 and rounded to fp32 once, as in torch. Gradients of bf16 or
// fp16 are read as fp32. Parameters are sent back rounded to nearest even.
#ifndef BYTEPS_SERVER_OPTIMIZER_UPDATE_H_
#define BYTEPS_SERVER_OPTIMIZER_UPDATE_H_

#include <cstddef>
#include <cstdint>

#include "byteps/base/dtype.h"

namespace byteps {
namespace core {

// Numbers of an AdamW step.
struct AdamWStep {
  double learning_rate = 0;
  double weight_decay = 0;  // decoupled: parameters shrink by learning_rate * weight_decay
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  uint64_t number = 1;   // step number from 1, for the bias correction
  float grad_scale = 1;  // factor for the gradients
};

// Numbers of an SGD step.
struct SgdStep {
  double learning_rate = 0;
  double weight_decay = 0;  // weight_decay * parameter is added to the gradient
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
  // Whether this is the first step: the momentum then becomes the gradient itself, as in torch.
  bool first = false;
  float grad_scale = 1;
};

// Update n elements. `values` holds gradients of type t (fp32, bf16 or fp16), which are overwritten
// with the parameters. Arguments must not overlap; `values` needs no alignment.
void UpdateAdamW(DType t, const AdamWStep& step, void* values, float* master, float* mean,
                 float* square, size_t n);
// `momentum` may be null if step.momentum is 0.
void UpdateSgd(DType t, const SgdStep& step, void* values, float* master, float* momentum,
               size_t n);

// Write to `parameters` the same bits as UpdateAdamW and UpdateSgd would, and change nothing else.
void PreviewAdamW(DType t, const AdamWStep& step, const void* gradients, void* parameters,
                  const float* master, const float* mean, const float* square, size_t n);
void PreviewSgd(DType t, const SgdStep& step, const void* gradients, void* parameters,
                const float* master, const float* momentum, size_t n);

// Computes values[i] = master[i], rounded to type t.
void RoundParameters(DType t, void* values, const float* master, size_t n);
// Computes wide[i] = values[i], of type t.
void WidenParameters(DType t, const void* values, float* wide, size_t n);

// Returns the sum of the squares of n values of type t, in fp64. The order of additions depends
// only on n.
double SumOfSquares(DType t, const void* values, size_t n);

// Returns the number of zeros (0 or -0) among n values of type t.
uint64_t CountZeros(DType t, const void* values, size_t n);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_OPTIMIZER_UPDATE_H_
