#ifndef BYTEPS_ENGINE_TENSOR_H_
#define BYTEPS_ENGINE_TENSOR_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>

#include "byteps/base/protocol.h"
#include "byteps/engine/plan.h"
#include "byteps/engine/round_window.h"

namespace byteps {
namespace core {

// A tensor that this worker sums, as declared to the servers. Only atomics and `running` change.
struct Tensor {
  uint64_t job = 0;  // number of the Declarations object that made the tensor
  Declaration declaration;
  uint64_t key = 0;
  Plan::Layout layout;
  std::atomic<uint32_t> rounds{0};    // number of rounds that this worker has begun
  std::atomic<uint32_t> oldest{0};    // oldest round that has not ended; if none, the next round
  std::atomic<bool> has_room{false};  // whether pinned memory is reserved; tensors on GPUs
  std::set<uint32_t> running;  // rounds that have not ended; guarded by the lock of Operations
  RoundWindow window{&oldest};
  std::atomic<bool> is_released{false};

  // BeginUse and EndUse begin and end a use of the tensor. The name uses the tensor until it is
  // released; a declaration in flight and each operation use it, too. The last user to end gives
  // the tensor back (Declarations::GiveBack).
  //
  // Returns false if no use is left. No use can begin then.
  bool BeginUse();
  // Returns true if the ended use was the last one.
  bool EndUse() { return users_.fetch_sub(1) == 1; }
  bool is_used() const { return users_ > 0; }

 private:
  std::atomic<uint32_t> users_{1};
};
using TensorPtr = std::shared_ptr<Tensor>;

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_TENSOR_H_
