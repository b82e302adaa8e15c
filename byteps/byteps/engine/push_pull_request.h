#ifndef BYTEPS_ENGINE_PUSH_PULL_REQUEST_H_
#define BYTEPS_ENGINE_PUSH_PULL_REQUEST_H_

#include <cstdint>
#include <string>

#include "byteps/base/dtype.h"
#include "byteps/base/protocol.h"
#include "byteps/device/device.h"
#include "byteps/engine/plan.h"

namespace byteps {
namespace core {

// Caller's values of a CPU tensor that travels in blocks of few bits (base/block_codec.h). A
// partition is encoded when it is pushed, and decoded when its sum arrives.
struct CodedValues {
  DType dtype = DType::kFloat32;
  uint64_t count = 0;  // number of values; 0: not coded, the tensor travels as it is
  // Index of the first wanted value; values outside [begin, end) stay unchanged.
  uint64_t begin = 0;
  uint64_t end = 0;
  const void* input = nullptr;
  void* output = nullptr;    // may be `input`
  uint16_t* lost = nullptr;  // with feedback: rounding errors, one per value
};

// Sum to be made. The caller owns the memory, and must not touch it until Wait has returned. After
// a failed Wait nothing writes into `output`, but the transport may read `input` until Stop.
struct PushPullRequest {
  TensorSpec tensor;  // input and output are on tensor.device
  const void* input = nullptr;
  void* output = nullptr;  // may be `input`
  CodedValues coded;       // if coded, `input` and `output` are the same memory, for the blocks
  // Range of the sum, or of the state, that the caller wants, in bytes. The rest of `output` stays
  // unchanged. If begin and end are equal, the caller wants no values.
  uint64_t pull_begin = 0;
  uint64_t pull_end = UINT64_MAX;  // end of the tensor
  int priority = 0;                // tensors of a higher priority are pushed first
  bool forgets_lost = false;       // tells servers to drop the rounding errors of earlier sums
  DeviceStream stream = nullptr;   // GPU stream; `input` is ready after the stream's work so far
  // For sums on a GPU: WaitFor makes the stream that it is given wait for the sum, and returns at
  // once (engine/staged_sum.h). Ignored if there is too little pinned memory.
  bool streamed = false;
  // The Op of the requests to servers. kPushPull makes a sum. For a tensor with a rule, op is
  // kPushStep, kPushNorm (`output`: GradientSums of each partition), kPushTry, kStep (for the round
  // of the last kPushNorm or kPushTry; without input), kLoadState (without output) or kReadState
  // (without input). State is fp32, on the CPU.
  int op = kPushPull;
  GradientSums* sums = nullptr;  // kPushTry: one per partition, on the CPU
  std::string detail;            // body after the header: an UpdateStep, or a slot

  // Size of the sum or state from which pull_begin and pull_end choose a range, in bytes.
  uint64_t OfferedBytes() const;
};

// Bytes of one fp32 state slot, for parameters of `bytes` bytes of type `dtype`.
inline uint64_t StateBytes(uint64_t bytes, DType dtype) {
  return ValuesIn(dtype, bytes) * sizeof(float);
}

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_PUSH_PULL_REQUEST_H_
