// Compiled without contraction of products and sums, and without errno (CMakeLists.txt): the first
// keeps the results the same everywhere, the second lets the compiler vectorise roots.
#include "byteps/server/optimizer/update.h"

#include <cmath>
#include <cstring>

#include "byteps/server/clones.h"

namespace byteps {
namespace core {
namespace {

// How gradients and parameters are stored.

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

struct BFloat16 {
  static constexpr size_t kSize = 2;
  static float Get(const void* p, size_t i) {
    uint16_t half;
    memcpy(&half, static_cast<const char*>(p) + i * kSize, kSize);
    const uint32_t word = static_cast<uint32_t>(half) << 16;
    float v;
    memcpy(&v, &word, sizeof(v));
    return v;
  }
  static void Put(void* p, size_t i, float v) {
    uint32_t word;
    memcpy(&word, &v, sizeof(word));
    // To nearest even, as the reducer rounds; a NaN would turn into infinity and is kept apart.
    const uint32_t rounded = word + 0x7fff + ((word >> 16) & 1);
    const uint16_t half = static_cast<uint16_t>((v != v ? word | 0x400000 : rounded) >> 16);
    memcpy(static_cast<char*>(p) + i * kSize, &half, kSize);
  }
};

// The coefficients of a step, as torch rounds them.
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
  const bool small_weight;  // torch's lerp starts from the nearer end
  const float beta2, weight2, root, eps, rate;
};

template <typename E, bool kSmallWeight>
BYTEPS_INLINE inline void AdamWLoop(const AdamWNumbers& c, void* values, float* __restrict master,
                                    float* __restrict mean, float* __restrict square, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const float g = E::Get(values, i) * c.scale;
    const float p = master[i] * c.keep;
    const float difference = g - mean[i];
    const float m = kSmallWeight ? mean[i] + c.weight1 * difference
                                 : g - difference * (1.0f - c.weight1);
    const float v = square[i] * c.beta2 + c.weight2 * g * g;
    const float updated = p + c.rate * m / (std::sqrt(v) / c.root + c.eps);
    mean[i] = m;
    square[i] = v;
    master[i] = updated;
    E::Put(values, i, updated);
  }
}

template <typename E>
BYTEPS_INLINE inline void AdamWEither(const AdamWNumbers& c, void* values, float* master,
                                      float* mean, float* square, size_t n) {
  if (c.small_weight) return AdamWLoop<E, true>(c, values, master, mean, square, n);
  AdamWLoop<E, false>(c, values, master, mean, square, n);
}

struct SgdNumbers {
  explicit SgdNumbers(const SgdStep& step)
      : scale(step.grad_scale),
        decay(static_cast<float>(step.weight_decay)),
        momentum(static_cast<float>(step.momentum)),
        weight(static_cast<float>(1 - step.dampening)),
        rate(static_cast<float>(-step.learning_rate)) {}

  const float scale, decay, momentum, weight, rate;
};

// What becomes of the momentum.
enum class Keeps { kNone, kFirst, kNext, kFirstNesterov, kNextNesterov };

template <typename E, Keeps kKeeps>
BYTEPS_INLINE inline void SgdLoop(const SgdNumbers& c, void* values, float* __restrict master,
                                  float* __restrict momentum, size_t n) {
  constexpr bool kFirst = kKeeps == Keeps::kFirst || kKeeps == Keeps::kFirstNesterov;
  constexpr bool kNesterov = kKeeps == Keeps::kFirstNesterov || kKeeps == Keeps::kNextNesterov;
  for (size_t i = 0; i < n; ++i) {
    float g = E::Get(values, i) * c.scale;
    g = g + c.decay * master[i];
    if constexpr (kKeeps != Keeps::kNone) {
      const float kept = kFirst ? g : momentum[i] * c.momentum + c.weight * g;
      momentum[i] = kept;
      g = kNesterov ? g + c.momentum * kept : kept;
    }
    const float updated = master[i] + c.rate * g;
    master[i] = updated;
    E::Put(values, i, updated);
  }
}

template <typename E>
BYTEPS_INLINE inline void SgdAny(const SgdNumbers& c, Keeps keeps, void* values, float* master,
                                 float* momentum, size_t n) {
  switch (keeps) {
    case Keeps::kNone:
      return SgdLoop<E, Keeps::kNone>(c, values, master, momentum, n);
    case Keeps::kFirst:
      return SgdLoop<E, Keeps::kFirst>(c, values, master, momentum, n);
    case Keeps::kNext:
      return SgdLoop<E, Keeps::kNext>(c, values, master, momentum, n);
    case Keeps::kFirstNesterov:
      return SgdLoop<E, Keeps::kFirstNesterov>(c, values, master, momentum, n);
    case Keeps::kNextNesterov:
      return SgdLoop<E, Keeps::kNextNesterov>(c, values, master, momentum, n);
  }
}

template <typename E>
BYTEPS_INLINE inline void RoundLoop(void* __restrict values, const float* __restrict master,
                                    size_t n) {
  for (size_t i = 0; i < n; ++i) E::Put(values, i, master[i]);
}

// Partial sums that are added side by side: of no width that a processor decides.
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

// A template cannot have clones; these are their instances.
#define BYTEPS_UPDATES(E)                                                                         \
  BYTEPS_MULTIVERSION void AdamW##E(const AdamWNumbers& c, void* values, float* master,           \
                                    float* mean, float* square, size_t n) {                       \
    AdamWEither<E>(c, values, master, mean, square, n);                                           \
  }                                                                                               \
  BYTEPS_MULTIVERSION void Sgd##E(const SgdNumbers& c, Keeps keeps, void* values, float* master,  \
                                  float* momentum, size_t n) {                                    \
    SgdAny<E>(c, keeps, values, master, momentum, n);                                             \
  }                                                                                               \
  BYTEPS_MULTIVERSION void Round##E(void* values, const float* master, size_t n) {                \
    RoundLoop<E>(values, master, n);                                                              \
  }                                                                                               \
  BYTEPS_MULTIVERSION double Squares##E(const void* values, size_t n) {                           \
    return SquaresLoop<E>(values, n);                                                             \
  }

BYTEPS_UPDATES(Float32)
BYTEPS_UPDATES(BFloat16)
#undef BYTEPS_UPDATES

}  // namespace

void UpdateAdamW(DType t, const AdamWStep& step, void* values, float* master, float* mean,
                 float* square, size_t n) {
  const AdamWNumbers numbers(step);
  t == DType::kBFloat16 ? AdamWBFloat16(numbers, values, master, mean, square, n)
                        : AdamWFloat32(numbers, values, master, mean, square, n);
}

void UpdateSgd(DType t, const SgdStep& step, void* values, float* master, float* momentum,
               size_t n) {
  const SgdNumbers numbers(step);
  Keeps keeps = Keeps::kNone;
  if (step.momentum != 0) {
    if (step.nesterov) {
      keeps = step.first ? Keeps::kFirstNesterov : Keeps::kNextNesterov;
    } else {
      keeps = step.first ? Keeps::kFirst : Keeps::kNext;
    }
  }
  t == DType::kBFloat16 ? SgdBFloat16(numbers, keeps, values, master, momentum, n)
                        : SgdFloat32(numbers, keeps, values, master, momentum, n);
}

void RoundParameters(DType t, void* values, const float* master, size_t n) {
  t == DType::kBFloat16 ? RoundBFloat16(values, master, n) : RoundFloat32(values, master, n);
}

double SumOfSquares(DType t, const void* values, size_t n) {
  return t == DType::kBFloat16 ? SquaresBFloat16(values, n) : SquaresFloat32(values, n);
}

}  // namespace core
}  // namespace byteps
