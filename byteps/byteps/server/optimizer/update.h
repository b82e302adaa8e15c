// The updates that a server makes: AdamW, and SGD with momentum, over fp32 state.
//
// The arithmetic is that of torch.optim (AdamW and SGD, foreach=False, fp32 on a CPU with AVX2),
// operation by operation and fused where torch fuses, so that the bits are the same, whatever
// CPU the server has.  Coefficients are worked out in fp64 and rounded to fp32 once, as torch
// does.  A gradient of bf16 or fp16 is read as fp32; the parameter that is sent back is the
// fp32 one, rounded to nearest even.
#ifndef BYTEPS_SERVER_OPTIMIZER_UPDATE_H_
#define BYTEPS_SERVER_OPTIMIZER_UPDATE_H_

#include <cstddef>
#include <cstdint>

#include "byteps/base/dtype.h"

namespace byteps {
namespace core {

// What AdamW needs to know of a step.
struct AdamWStep {
  double learning_rate = 0;
  double weight_decay = 0;  // decoupled: parameters shrink by learning_rate * weight_decay
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  uint64_t number = 1;   // of the step, for the bias correction: 1 is the first
  float grad_scale = 1;  // gradients are multiplied by it
};

// What SGD needs to know.
struct SgdStep {
  double learning_rate = 0;
  double weight_decay = 0;  // added to the gradient, times the parameter
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
  bool first = false;  // the momentum, which is 0, becomes the gradient itself, as in torch
  float grad_scale = 1;
};

// Of n elements: `values` holds their gradients, of type t (fp32, bf16 or fp16), and then their
// parameters.  Nothing may overlap; `values` needs no alignment.
void UpdateAdamW(DType t, const AdamWStep& step, void* values, float* master, float* mean,
                 float* square, size_t n);
// `momentum` may be null when step.momentum is 0.
void UpdateSgd(DType t, const SgdStep& step, void* values, float* master, float* momentum,
               size_t n);

// The same parameters, to the bit, rounded into `parameters`; all else stays as it is.
void PreviewAdamW(DType t, const AdamWStep& step, const void* gradients, void* parameters,
                  const float* master, const float* mean, const float* square, size_t n);
void PreviewSgd(DType t, const SgdStep& step, const void* gradients, void* parameters,
                const float* master, const float* momentum, size_t n);

// values[i] = master[i], rounded to type t.
void RoundParameters(DType t, void* values, const float* master, size_t n);
// wide[i] = values[i], of type t.
void WidenParameters(DType t, const void* values, float* wide, size_t n);

// The sum of the squares of n values of type t, in fp64, added in an order that depends on n
// alone.
double SumOfSquares(DType t, const void* values, size_t n);

// How many of n values of type t are 0, or -0.
uint64_t CountZeros(DType t, const void* values, size_t n);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_OPTIMIZER_UPDATE_H_
