// What servers are told of an optimizer: once, how parameters are updated, and with each step, by
// how much.
#ifndef BYTEPS_BASE_UPDATE_RULE_H_
#define BYTEPS_BASE_UPDATE_RULE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "byteps/base/dtype.h"

namespace byteps {
namespace core {

// How a tensor of parameters is updated from its summed gradients.  A part of its declaration.
//
// On the wire, little-endian: u8 algorithm, u8 in_order, u8 speculative, u8 counts_zeros, u8 held,
// u32 groups, each: u64 times 3, the bits of beta1, beta2 and eps, and u8 nesterov; u32 segments,
// each: u64 end, u32 group, u8 counted.
struct UpdateRule {
  // The numbers are part of the protocol.
  enum Algorithm : uint8_t { kAdamW = 1, kSgd = 2 };

  // Parameters that are updated alike.  Of SGD, beta1 is the momentum, beta2 its dampening.
  struct Group {
    double beta1 = 0;
    double beta2 = 0;
    double eps = 0;
    bool nesterov = false;
    bool operator==(const Group&) const = default;
  };

  // Elements from the end of the segment before, or 0, up to `end`.
  struct Segment {
    uint64_t end = 0;
    uint32_t group = 0;
    // In GradientSums.  Of a parameter that several tensors hold, one copy is.
    bool counted = true;
    bool operator==(const Segment&) const = default;
  };

  Algorithm algorithm = kAdamW;
  // Gradients are added in the order of ranks, not of arrival, so that the same gradients of other
  // ranks, in another tensor, give the same bits.
  bool in_order = false;
  // Steps may be tried (PUSH_TRY): the server keeps the gradients until it hears what becomes of
  // them.
  bool speculative = false;
  // GradientSums tell how many gradients are 0.
  bool counts_zeros = false;
  // Of gradients in blocks: the type in which workers hold the parameters.
  DType held = DType::kFloat32;
  std::vector<Group> groups;
  // Of values, ascending; the last one ends with the tensor.
  std::vector<Segment> segments;

  // fp32 values kept for each parameter: the parameter itself, and its moments or momentum.
  uint32_t NumSlots() const;
  // "AdamW of 2 groups, 12 bytes of state a parameter"; of one that is speculative ", and its
  // gradient until a step is kept" as well
  std::string Describe() const;
  std::string Pack() const;
  // False when `text` is no rule for a tensor of so many values.
  static bool Unpack(const std::string& text, uint64_t values, UpdateRule* rule);
  bool operator==(const UpdateRule&) const = default;
};

// Of the summed gradients of a partition that count.  As it is on the wire: fp64, little-endian.
struct GradientSums {
  double squares = 0;  // added up; no finite number if any gradient is none, counted or not
  double zeros = 0;    // how many are 0, if the rule counts them
};
static_assert(sizeof(GradientSums) == 16);

// What becomes of the step that a member tried last.  The numbers are part of the protocol.
enum class Verdict : uint8_t {
  kNone = 0,  // it tried none, or has said so already
  kKeep = 1,  // it stands
  kDrop = 2,  // the state stays as it was before
};

// One step of an optimizer, as all members of the group say it.
//
// On the wire, little-endian: u64 number, u64 bits of grad_scale, u8 skip, u32 rates, each: u64
// times 2, the bits of the learning rate and of the weight decay.
struct UpdateStep {
  struct Rate {
    double learning_rate = 0;
    double weight_decay = 0;
    bool operator==(const Rate&) const = default;
  };

  uint64_t number = 1;  // the first one is 1; steps that are skipped are not counted
  double grad_scale = 1;
  bool skip = false;        // nothing is updated
  std::vector<Rate> rates;  // by group

  // "step 3 with learning rates 0.1, 0.05, weight decays 0.1, 0, gradients times 1"
  std::string Describe() const;
  std::string Pack() const;
  // False when `text` is no step.
  static bool Unpack(const std::string& text, UpdateStep* step);
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_BASE_UPDATE_RULE_H_
