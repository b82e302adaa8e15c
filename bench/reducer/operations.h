// The reducer's additions, each with a plain loop that uses memory alike; the optimizer's updates;
// and elements of gradient types, computed independently of the reducer.
#ifndef BENCH_REDUCER_OPERATIONS_H_
#define BENCH_REDUCER_OPERATIONS_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "byteps/base/dtype.h"
#include "byteps/server/optimizer/update.h"
#include "byteps/server/reducer.h"

namespace bench {

enum class Use { kNone, kRead, kWrite, kUpdate };

// The use of one of three buffers by an operation. A wide buffer holds accumulators.
struct Stream {
  Use use = Use::kNone;
  bool wide = false;
};

constexpr bool Reads(Stream s) { return s.use == Use::kRead || s.use == Use::kUpdate; }
constexpr bool Writes(Stream s) { return s.use == Use::kWrite || s.use == Use::kUpdate; }

constexpr Stream kRead{Use::kRead, false};
constexpr Stream kWrite{Use::kWrite, false};
constexpr Stream kUpdate{Use::kUpdate, false};
constexpr Stream kReadWide{Use::kRead, true};
constexpr Stream kWriteWide{Use::kWrite, true};
constexpr Stream kUpdateWide{Use::kUpdate, true};

constexpr size_t kLine = 64;

typedef uint64_t Line __attribute__((vector_size(kLine)));

inline Line Load(const char* p) {
  Line v;
  memcpy(&v, p, sizeof(v));
  return v;
}

template <Stream S>
inline void Fetch(const char* p, size_t step, Line* lines) {
  if constexpr (Reads(S)) {
    constexpr size_t count = S.wide ? 2 : 1;
    for (size_t i = 0; i < count; ++i) lines[i % 2] += Load(p + (step * count + i) * kLine);
    if constexpr (!S.wide) lines[1] += lines[0];
  }
}

template <Stream S>
inline void Put(char* p, size_t step, const Line* lines) {
  if constexpr (Writes(S)) {
    constexpr size_t count = S.wide ? 2 : 1;
    for (size_t i = 0; i < count; ++i) memcpy(p + (step * count + i) * kLine, &lines[i], kLine);
  }
}

// Reads and writes the lines of three buffers, as the streams say. `steps` counts lines of narrow
// buffers. A wide buffer has twice as many.
template <Stream A, Stream B, Stream C>
void Touch(char* a, char* b, char* c, size_t steps) {
  for (size_t step = 0; step < steps; ++step) {
    Line lines[2] = {Line{} + 1, Line{} + 1};  // updated memory must change
    Fetch<A>(a, step, lines);
    Fetch<B>(b, step, lines);
    Fetch<C>(c, step, lines);
    Put<A>(a, step, lines);
    Put<B>(b, step, lines);
    Put<C>(c, step, lines);
  }
}

}  // namespace bench

// Table of measured operations. It has a row per function of the reducer.

namespace bench {

using byteps::core::DType;

// An operation over the first n elements of three buffers.
using Run = std::function<void(DType, char*, char*, char*, size_t)>;
// Instance of Touch.
using Plain = void (*)(char*, char*, char*, size_t steps);

struct Operation {
  const char* name;
  Stream streams[3];
  Plain plain;
  Run run;
  // Value of the written buffer afterwards, from the three values before.
  double (*expected)(double, double, double);
  // The same operation as a loop of plain arithmetic. Null if memory alone limits a plain loop.
  Run arithmetic;
};

template <Stream A, Stream B = Stream{}, Stream C = Stream{}>
Operation Make(const char* name, Run run, double (*expected)(double, double, double),
               Run arithmetic = nullptr) {
  return {name, {A, B, C}, &Touch<A, B, C>, std::move(run), expected, std::move(arithmetic)};
}

// Bytes of an accumulator: twice those of an element.
inline size_t WideSize(DType t) { return byteps::core::AccumulatorSize(t); }

// Straightforward implementations of the types, for finite values.

template <typename T>
struct PlainNumber {
  static T Get(const char* p, size_t i) {
    T v;
    memcpy(&v, p + i * sizeof(v), sizeof(v));
    return v;
  }
  template <typename Value>
  static void Put(char* p, size_t i, Value value) {
    const T v = static_cast<T>(value);
    memcpy(p + i * sizeof(v), &v, sizeof(v));
  }
};

struct PlainBFloat16 {
  static float Get(const char* p, size_t i) {
    const uint32_t word = static_cast<uint32_t>(PlainNumber<uint16_t>::Get(p, i)) << 16;
    float v;
    memcpy(&v, &word, sizeof(v));
    return v;
  }
  static void Put(char* p, size_t i, float v) {
    uint32_t word;
    memcpy(&word, &v, sizeof(v));
    PlainNumber<uint16_t>::Put(p, i, (word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
};

// Makes `n` elements of `a` the averages of `a` and `b`, with the operators of C++.
template <typename A, typename B>
void AverageLoop(char* __restrict a, const char* __restrict b, int divisor, size_t n) {
  using Value = decltype(B::Get(b, 0));
  const Value d = static_cast<Value>(divisor);
  for (size_t i = 0; i < n; ++i) A::Put(a, i, (A::Get(a, i) + B::Get(b, i)) / d);
}

// Returns whether averages of the type are compared with a plain loop.
inline bool HasPlainAverage(DType t) { return t == DType::kFloat32 || t == DType::kBFloat16; }

inline void PlainAverage(DType t, bool wide, char* a, const char* b, int divisor, size_t n) {
  using Float = PlainNumber<float>;
  if (t == DType::kBFloat16) {
    return wide ? AverageLoop<PlainBFloat16, Float>(a, b, divisor, n)
                : AverageLoop<PlainBFloat16, PlainBFloat16>(a, b, divisor, n);
  }
  return wide ? AverageLoop<Float, PlainNumber<double>>(a, b, divisor, n)
              : AverageLoop<Float, Float>(a, b, divisor, n);
}

// Operations that divide, for sums and for averages over a number of workers.
template <int divisor>
void AddDividing(std::vector<Operation>* table, const char* add, const char* end) {
  namespace core = byteps::core;
  table->push_back(Make<kUpdate, kRead>(
      add, [](DType t, char* a, char* b, char*, size_t n) { core::Add(t, a, b, divisor, n); },
      [](double a, double b, double) { return (a + b) / divisor; },
      [](DType t, char* a, char* b, char*, size_t n) {
        PlainAverage(t, false, a, b, divisor, n);
      }));
  table->push_back(Make<kUpdate, kReadWide>(
      end, [](DType t, char* a, char* b, char*, size_t n) { core::WideEnd(t, a, b, divisor, n); },
      [](double a, double b, double) { return (a + b) / divisor; },
      [](DType t, char* a, char* b, char*, size_t n) { PlainAverage(t, true, a, b, divisor, n); }));
}

inline std::vector<Operation> Operations() {
  namespace core = byteps::core;
  std::vector<Operation> table = {
      Make<kWriteWide, kRead, kRead>(
          "wide = a + b",
          [](DType t, char* a, char* b, char* c, size_t n) { core::WideBegin(t, a, b, c, n); },
          [](double, double b, double c) { return b + c; }),
      Make<kUpdateWide, kRead>(
          "wide += in",
          [](DType t, char* a, char* b, char*, size_t n) { core::WideAdd(t, a, b, n); },
          [](double a, double b, double) { return a + b; }),
  };
  AddDividing<1>(&table, "sum += in", "last += wide");
  AddDividing<3>(&table, "sum = (sum + in) / 3", "last = (wide + last) / 3");
  return table;
}

}  // namespace bench

// Conversions of every type from and to double, independent of the reducer.

namespace bench {

// Values are small multiples of every divisor, which are exact in every type, even after an
// addition and a division. They differ by buffer and, up to a period, by index. None is 0, because
// repeated divisions would make it subnormal, which is slow.
constexpr size_t kPeriod = 5;
inline int Value(int buffer, size_t i) {
  return 12 * (1 + static_cast<int>((i * 7 + buffer * 3) % kPeriod));
}

template <typename T>
void StoreAs(char* p, size_t i, double v) {
  const T x = static_cast<T>(v);
  memcpy(p + i * sizeof(T), &x, sizeof(T));
}

template <typename T>
double LoadAs(const char* p, size_t i) {
  T x;
  memcpy(&x, p + i * sizeof(T), sizeof(T));
  return static_cast<double>(x);
}

// Conversions of the two half types by plain arithmetic, which check the reducer's conversions.
// They are valid for 0 and for normal numbers with few digits.
inline uint16_t PackHalf(DType t, double v) {
  const int mantissa_bits = t == DType::kBFloat16 ? 7 : 10;
  const int bias = t == DType::kBFloat16 ? 127 : 15;
  if (v == 0) return 0;
  int exponent = 0;
  const double fraction = frexp(v, &exponent);  // v = fraction * 2^exponent, 0.5 <= fraction < 1
  const int mantissa = static_cast<int>((fraction * 2 - 1) * (1 << mantissa_bits));
  return static_cast<uint16_t>((exponent - 1 + bias) << mantissa_bits | mantissa);
}

inline double UnpackHalf(DType t, uint16_t h) {
  const int mantissa_bits = t == DType::kBFloat16 ? 7 : 10;
  const int bias = t == DType::kBFloat16 ? 127 : 15;
  if (h == 0) return 0;
  const double mantissa = h & ((1 << mantissa_bits) - 1);
  return ldexp(1 + ldexp(mantissa, -mantissa_bits), (h >> mantissa_bits) - bias);
}

inline void Put(DType t, bool wide, char* p, size_t i, double v) {
  if (wide) return WideSize(t) == 4 ? StoreAs<float>(p, i, v) : StoreAs<double>(p, i, v);
  if (t == DType::kFloat32) return StoreAs<float>(p, i, v);
  const uint16_t h = PackHalf(t, v);
  memcpy(p + i * sizeof(h), &h, sizeof(h));
}

inline double Get(DType t, bool wide, const char* p, size_t i) {
  if (wide) return WideSize(t) == 4 ? LoadAs<float>(p, i) : LoadAs<double>(p, i);
  if (t == DType::kFloat32) return LoadAs<float>(p, i);
  uint16_t h;
  memcpy(&h, p + i * sizeof(h), sizeof(h));
  return UnpackHalf(t, h);
}

}  // namespace bench

// The optimizer's updates: gradients or parameters in one buffer, fp32 state in others.

namespace bench {

// AdamW over consecutive partitions.
class AdamWRun {
 public:
  static constexpr int kSlots = 3;

  AdamWRun(DType t, size_t elements)
      : t_(t), size_(byteps::core::SizeOf(t)), values_(elements * size_) {
    for (auto& slot : slots_) slot.resize(elements);
    Fill();
  }

  // Number of bytes that are read, and then written, per element.
  size_t width() const { return size_ + kSlots * sizeof(float); }

  void Fill() {
    for (size_t i = 0; i < slots_[0].size(); ++i) {
      Put(t_, false, values_.data(), i, Gradient(i));
      for (int slot = 0; slot < kSlots; ++slot) slots_[slot][i] = Start(slot, i);
    }
  }

  void Update(size_t begin, size_t n) {
    byteps::core::UpdateAdamW(t_, Step(), values_.data() + begin * size_, &slots_[0][begin],
                              &slots_[1][begin], &slots_[2][begin], n);
  }

  // Reads and writes the same lines, and computes almost nothing.
  void Plain(size_t begin, size_t n) {
    TouchLines(values_.data() + begin * size_, n * size_ / kLine);
    for (auto& slot : slots_) {
      TouchLines(reinterpret_cast<char*>(&slot[begin]), n * sizeof(float) / kLine);
    }
  }

  // Makes one update. Returns the number of elements that differ from a computation in fp64.
  size_t CountWrong() {
    Fill();
    Update(0, slots_[0].size());
    size_t wrong = 0;
    for (size_t i = 0; i < slots_[0].size(); ++i) {
      const double g = Gradient(i);
      const double mean = Start(1, i) * Step().beta1 + g * (1 - Step().beta1);
      const double square = Start(2, i) * Step().beta2 + g * g * (1 - Step().beta2);
      const double corrected = square / (1 - std::pow(Step().beta2, Step().number));
      const double rate = Step().learning_rate / (1 - std::pow(Step().beta1, Step().number));
      const double parameter = Start(0, i) * (1 - Step().learning_rate * Step().weight_decay) -
                               rate * mean / (std::sqrt(corrected) + Step().eps);
      const double rounding = size_ == 2 ? 4e-3 : 1e-6;
      wrong += !Near(slots_[0][i], parameter, 1e-6) || !Near(slots_[1][i], mean, 1e-6) ||
               !Near(slots_[2][i], square, 1e-6) ||
               !Near(Get(t_, false, values_.data(), i), parameter, rounding);
    }
    return wrong;
  }

 private:
  static byteps::core::AdamWStep Step() { return {0.01, 0.1, 0.9, 0.95, 1e-8, 10, 1.0f}; }
  static double Gradient(size_t i) { return Value(0, i) / 16.0; }
  static float Start(int slot, size_t i) { return static_cast<float>(Value(slot, i + slot)); }
  static bool Near(double found, double expected, double tolerance) {
    return std::abs(found - expected) <= tolerance * std::abs(expected);
  }
  static void TouchLines(char* p, size_t lines) {
    for (size_t i = 0; i < lines; ++i) {
      const Line line = Load(p + i * kLine) + 1;
      memcpy(p + i * kLine, &line, kLine);
    }
  }

  const DType t_;
  const size_t size_;
  std::vector<char> values_;
  std::vector<float> slots_[kSlots];
};

}  // namespace bench

#endif  // BENCH_REDUCER_OPERATIONS_H_
