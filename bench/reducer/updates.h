// The optimizer's updates: gradients or parameters in one buffer, and fp32 state in others.
#ifndef BENCH_REDUCERKIT_UPDATES_H_
#define BENCH_REDUCERKIT_UPDATES_H_

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "byteps/server/optimizer/update.h"
#include "streams.h"
#include "values.h"

namespace bench {

// AdamW over partitions, which lie one after the other.
class AdamWRun {
 public:
  static constexpr int kSlots = 3;

  AdamWRun(DType t, size_t elements)
      : t_(t), size_(byteps::core::SizeOf(t)), values_(elements * size_) {
    for (auto& slot : slots_) slot.resize(elements);
    Fill();
  }

  // Bytes of an element, read and then written.
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

  // Reads and writes the same lines, and computes nothing to speak of.
  void Plain(size_t begin, size_t n) {
    TouchLines(values_.data() + begin * size_, n * size_ / kLine);
    for (auto& slot : slots_) {
      TouchLines(reinterpret_cast<char*>(&slot[begin]), n * sizeof(float) / kLine);
    }
  }

  // After one update of all: elements that differ from what fp64 makes of them.
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
#endif  // BENCH_REDUCERKIT_UPDATES_H_
