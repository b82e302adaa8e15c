// CMakeLists.txt compiles this file without automatic contraction: products and sums are fused only
// where the code says so, and all CPUs compute equal results. errno is off, so that the compiler
// can vectorise square roots.
#include "byteps/server/optimizer/update.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "byteps/base/dtype.h"

namespace byteps {
namespace core {
namespace {

// Formats of gradients and parameters.

struct Float32 {
  static constexpr size_t kSize = 4;
  static float Get(const void* p, size_t i) {
    float v;
    memcpy(&v, static_cast<const char*>(p) + i * kSize, kSize);
    return v;
  }
  static void Put(void* p, size_t i, float v) {
    memcpy(static_cast<char*>(p) + i * kSize, &v, kSize);
  }
};

template <typename Words>
struct Half {
  static constexpr size_t kSize = 2;
  static float Get(const void* p, size_t i) {
    uint16_t half;
    memcpy(&half, static_cast<const char*>(p) + i * kSize, kSize);
    return FromHalf<Words>(half);
  }
  static void Put(void* p, size_t i, float v) {
    const uint16_t half = ToHalf<Words>(v);
    memcpy(static_cast<char*>(p) + i * kSize, &half, kSize);
  }
};

using BFloat16 = Half<BFloat16Words>;
using Float16 = Half<Float16Words>;

// Returns a * b + c, rounded once. CPUs without FMA (x86 before 2013) need a function call.
BYTEPS_INLINE inline float Fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// Coefficients of a step, rounded as torch rounds them.
struct AdamWNumbers {
  explicit AdamWNumbers(const AdamWStep& step)
      : scale(step.grad_scale),
        keep(step.weight_decay == 0
                 ? 1.0f
                 : static_cast<float>(1 - step.learning_rate * step.weight_decay)),
        weight1(static_cast<float>(1 - step.beta1)),
        small_weight(std::abs(weight1) < 0.5f),
        beta2(static_cast<float>(step.beta2)),
        weight2(static_cast<float>(1 - step.beta2)),
        root(static_cast<float>(
            std::sqrt(1 - std::pow(step.beta2, static_cast<double>(step.number))))),
        eps(static_cast<float>(step.eps)),
        rate(static_cast<float>(
            -(step.learning_rate / (1 - std::pow(step.beta1, static_cast<double>(step.number)))))) {
  }

  const float scale, keep, weight1;
  const bool small_weight;  // torch's lerp starts from the nearer end; this says which
  const float beta2, weight2, root, eps, rate;
};

// State is `float` if the loop updates it, `const float` if the loop only reads it.
template <typename E, bool kSmallWeight, typename State>
BYTEPS_INLINE inline void AdamWLoop(const AdamWNumbers& c, const void* gradients, void* parameters,
                                    State* __restrict master, State* __restrict mean,
                                    State* __restrict square, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const float g = E::Get(gradients, i) * c.scale;
    const float p = master[i] * c.keep;
    const float difference = g - mean[i];
    const float m = kSmallWeight ? Fused(c.weight1, difference, mean[i])
                                 : Fused(c.weight1 - 1.0f, difference, g);
    const float v = Fused(c.weight2 * g, g, square[i] * c.beta2);
    const float updated = p + c.rate * m / (std::sqrt(v) / c.root + c.eps);
    if constexpr (!std::is_const_v<State>) {
      mean[i] = m;
      square[i] = v;
      master[i] = updated;
    }
    E::Put(parameters, i, updated);
  }
}

template <typename E, typename State>
BYTEPS_INLINE inline void AdamWEither(const AdamWNumbers& c, const void* gradients,
                                      void* parameters, State* master, State* mean, State* square,
                                      size_t n) {
  if (c.small_weight) {
    return AdamWLoop<E, true>(c, gradients, parameters, master, mean, square, n);
  }
  AdamWLoop<E, false>(c, gradients, parameters, master, mean, square, n);
}

struct SgdNumbers {
  explicit SgdNumbers(const SgdStep& step)
      : scale(step.grad_scale),
        decay(static_cast<float>(step.weight_decay)),
        momentum(static_cast<float>(step.momentum)),
        kept(step.first ? 0.0f : momentum),
        weight(step.first ? 1.0f : static_cast<float>(1 - step.dampening)),
        rate(static_cast<float>(-step.learning_rate)) {}

  const float scale, decay, momentum, kept, weight, rate;
};

// Way in which the step uses the momentum.
enum class Momentum { kNone, kPlain, kNesterov };

template <typename E, Momentum kUse, typename State>
BYTEPS_INLINE inline void SgdLoop(const SgdNumbers& c, const void* gradients, void* parameters,
                                  State* __restrict master, State* __restrict momentum, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    float g = E::Get(gradients, i) * c.scale;
    g = Fused(c.decay, master[i], g);
    if constexpr (kUse != Momentum::kNone) {
      const float m = Fused(c.weight, g, momentum[i] * c.kept);
      if constexpr (!std::is_const_v<State>) momentum[i] = m;
      g = kUse == Momentum::kNesterov ? Fused(c.momentum, m, g) : m;
    }
    const float updated = Fused(c.rate, g, master[i]);
    if constexpr (!std::is_const_v<State>) master[i] = updated;
    E::Put(parameters, i, updated);
  }
}

template <typename E, typename State>
BYTEPS_INLINE inline void SgdAny(const SgdNumbers& c, Momentum use, const void* gradients,
                                 void* parameters, State* master, State* momentum, size_t n) {
  switch (use) {
    case Momentum::kNone:
      return SgdLoop<E, Momentum::kNone>(c, gradients, parameters, master, momentum, n);
    case Momentum::kPlain:
      return SgdLoop<E, Momentum::kPlain>(c, gradients, parameters, master, momentum, n);
    case Momentum::kNesterov:
      return SgdLoop<E, Momentum::kNesterov>(c, gradients, parameters, master, momentum, n);
  }
}

template <typename E>
BYTEPS_INLINE inline void RoundLoop(void* __restrict values, const float* __restrict master,
                                    size_t n) {
  for (size_t i = 0; i < n; ++i) E::Put(values, i, master[i]);
}

template <typename E>
BYTEPS_INLINE inline void WidenLoop(const void* __restrict values, float* __restrict wide,
                                    size_t n) {
  for (size_t i = 0; i < n; ++i) wide[i] = E::Get(values, i);
}

// Number of parallel partial sums. Fixed, so that every CPU computes the same bits.
constexpr size_t kLanes = 16;

template <typename E>
BYTEPS_INLINE inline double SquaresLoop(const void* values, size_t n) {
  double lanes[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (size_t j = 0; j < kLanes; ++j) {
      const double v = E::Get(values, i + j);
      lanes[j] += v * v;
    }
  }
  double sum = 0;
  for (; i < n; ++i) {
    const double v = E::Get(values, i);
    sum += v * v;
  }
  for (const double lane : lanes) sum += lane;
  return sum;
}

template <typename E>
BYTEPS_INLINE inline uint64_t ZerosLoop(const void* values, size_t n) {
  uint64_t zeros = 0;
  for (size_t i = 0; i < n;) {
    const size_t end = std::min(n, i + (size_t{1} << 20));
    uint32_t zeros_of_chunk =
        0;  // 32 bits, like the values, so that the compiler vectorises the loop
    for (; i < end; ++i) zeros_of_chunk += E::Get(values, i) == 0.0f ? 1 : 0;
    zeros += zeros_of_chunk;
  }
  return zeros;
}

// These functions instantiate the templates: a template cannot have clones for several CPUs.
#define BYTEPS_UPDATES(E)                                                                          \
  BYTEPS_MULTIVERSION void AdamW##E(const AdamWNumbers& c, void* values, float* master,            \
                                    float* mean, float* square, size_t n) {                        \
    AdamWEither<E>(c, values, values, master, mean, square, n);                                    \
  }                                                                                                \
  BYTEPS_MULTIVERSION void PreviewAdamW##E(const AdamWNumbers& c, const void* gradients,           \
                                           void* parameters, const float* master,                  \
                                           const float* mean, const float* square, size_t n) {     \
    AdamWEither<E>(c, gradients, parameters, master, mean, square, n);                             \
  }                                                                                                \
  BYTEPS_MULTIVERSION void Sgd##E(const SgdNumbers& c, Momentum use, void* values, float* master,  \
                                  float* momentum, size_t n) {                                     \
    SgdAny<E>(c, use, values, values, master, momentum, n);                                        \
  }                                                                                                \
  BYTEPS_MULTIVERSION void PreviewSgd##E(const SgdNumbers& c, Momentum use, const void* gradients, \
                                         void* parameters, const float* master,                    \
                                         const float* momentum, size_t n) {                        \
    SgdAny<E>(c, use, gradients, parameters, master, momentum, n);                                 \
  }                                                                                                \
  BYTEPS_MULTIVERSION void Round##E(void* values, const float* master, size_t n) {                 \
    RoundLoop<E>(values, master, n);                                                               \
  }                                                                                                \
  BYTEPS_MULTIVERSION void Widen##E(const void* values, float* wide, size_t n) {                   \
    WidenLoop<E>(values, wide, n);                                                                 \
  }                                                                                                \
  BYTEPS_MULTIVERSION double Squares##E(const void* values, size_t n) {                            \
    return SquaresLoop<E>(values, n);                                                              \
  }                                                                                                \
  BYTEPS_MULTIVERSION uint64_t Zeros##E(const void* values, size_t n) {                            \
    return ZerosLoop<E>(values, n);                                                                \
  }

BYTEPS_UPDATES(Float32)
BYTEPS_UPDATES(BFloat16)
BYTEPS_UPDATES(Float16)
#undef BYTEPS_UPDATES

Momentum UseOf(const SgdStep& step) {
  if (step.momentum == 0) return Momentum::kNone;
  return step.nesterov ? Momentum::kNesterov : Momentum::kPlain;
}

}  // namespace

// Calls the function for a type: fp32, bf16 or fp16.
#define BYTEPS_OF_TYPE(t, Function, ...)      \
  switch (t) {                                \
    case DType::kBFloat16:                    \
      return Function##BFloat16(__VA_ARGS__); \
    case DType::kFloat16:                     \
      return Function##Float16(__VA_ARGS__);  \
    default:                                  \
      return Function##Float32(__VA_ARGS__);  \
  }

void UpdateAdamW(DType t, const AdamWStep& step, void* values, float* master, float* mean,
                 float* square, size_t n) {
  const AdamWNumbers numbers(step);
  BYTEPS_OF_TYPE(t, AdamW, numbers, values, master, mean, square, n);
}

void PreviewAdamW(DType t, const AdamWStep& step, const void* gradients, void* parameters,
                  const float* master, const float* mean, const float* square, size_t n) {
  const AdamWNumbers numbers(step);
  BYTEPS_OF_TYPE(t, PreviewAdamW, numbers, gradients, parameters, master, mean, square, n);
}

void UpdateSgd(DType t, const SgdStep& step, void* values, float* master, float* momentum,
               size_t n) {
  const SgdNumbers numbers(step);
  BYTEPS_OF_TYPE(t, Sgd, numbers, UseOf(step), values, master, momentum, n);
}

void PreviewSgd(DType t, const SgdStep& step, const void* gradients, void* parameters,
                const float* master, const float* momentum, size_t n) {
  const SgdNumbers numbers(step);
  BYTEPS_OF_TYPE(t, PreviewSgd, numbers, UseOf(step), gradients, parameters, master, momentum, n);
}

void RoundParameters(DType t, void* values, const float* master, size_t n) {
  BYTEPS_OF_TYPE(t, Round, values, master, n);
}

void WidenParameters(DType t, const void* values, float* wide, size_t n) {
  BYTEPS_OF_TYPE(t, Widen, values, wide, n);
}

double SumOfSquares(DType t, const void* values, size_t n) {
  BYTEPS_OF_TYPE(t, Squares, values, n);
}

uint64_t CountZeros(DType t, const void* values, size_t n) { BYTEPS_OF_TYPE(t, Zeros, values, n); }

#undef BYTEPS_OF_TYPE

}  // namespace core
}  // namespace byteps
