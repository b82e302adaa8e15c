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

// The caller's values of a tensor on the CPU that travels in blocks of few bits
// (base/block_codec.h).  They are encoded partition by partition as they are pushed, and decoded as
// their sums come.
struct CodedValues {
  DType dtype = DType::kFloat32;
  uint64_t count = 0;  // 0: there are none, and the tensor travels as it is
  uint64_t begin = 0;  // of the values that are wanted; the others stay as they are
  uint64_t end = 0;
  const void* input = nullptr;
  void* output = nullptr;    // may be `input`
  uint16_t* lost = nullptr;  // by rounding, for each value, with feedback
};

// One sum to be made.  The memory belongs to the caller, who keeps it alive and leaves it alone
// until Wait has returned.  After a failed Wait nothing is written into `output` any more, but
// the transport may still read `input` until Stop.
struct PushPullRequest {
  TensorSpec tensor;  // input and output are on tensor.device
  const void* input = nullptr;
  void* output = nullptr;  // may be `input`
  CodedValues coded;       // whose blocks are in `input`, which is `output` then
  // The part of the sum, or of the state, that is wanted, in bytes; the rest of `output`
  // stays as it is.  Equal ends: nothing is.
  uint64_t pull_begin = 0;
  uint64_t pull_end = UINT64_MAX;  // to the end of the tensor
  int priority = 0;                // higher goes first
  bool forgets_lost = false;       // servers, of what rounding lost of the sums before
  DeviceStream stream = nullptr;   // of the GPU: after whose work so far input is ready
  // Of a sum on a GPU: WaitFor returns at once, and its stream waits (engine/staged_sum.h).  Not
  // if there is too little pinned memory: then WaitFor waits for the sum, as always.
  bool streamed = false;
  // What is asked of the servers: kPushPull for a sum; of a tensor with a rule kPushStep,
  // kPushNorm (output: GradientSums of each partition), kPushTry, kStep (of the round of the last
  // kPushNorm or kPushTry; no input), kLoadState (no output) or kReadState (no input).  State is
  // fp32 and on the CPU.
  int op = kPushPull;
  GradientSums* sums = nullptr;  // of kPushTry: for each partition, on the CPU
  std::string detail;            // what follows the header: an UpdateStep, or a slot

  // All of what pull_begin and pull_end name a part of.
  uint64_t OfferedBytes() const;
};

// The fp32 values of a state, in bytes, for so many bytes of parameters of a type.
inline uint64_t StateBytes(uint64_t bytes, DType dtype) {
  return ValuesIn(dtype, bytes) * sizeof(float);
}

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_PUSH_PULL_REQUEST_H_
